"""Configuration: YAML, its composition and validation, the command line, and what it prints."""
