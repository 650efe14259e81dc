"""Executing what a model asks for, and the codec of both logs."""
