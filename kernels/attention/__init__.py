"""Attention: rotary embedding, compression, selection, sparse attention with sinks."""
