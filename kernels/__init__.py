"""Every numeric operation of learner and engine, each with a reference in plain torch."""
