"""Questions with verifiers: records, configuration, and one file for each kind of task."""
