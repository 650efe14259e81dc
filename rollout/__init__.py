"""Sampling: engines, their write-ahead log, and the records that training reads."""
