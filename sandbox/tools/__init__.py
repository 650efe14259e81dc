"""Tools that ship: one a file, named after its function. They are read as text and run in the sandbox only."""
