"""What several tests share; imported as `tests.helpers.<module>`."""
