"""Mixture of experts: routing and expert products."""
