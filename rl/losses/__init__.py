"""Policy losses: pure functions, one algorithm a file; `registry.py` lists them."""
