"""Programs that run inside bubblewrap; they see the standard library, each other, and nothing else of the project."""
