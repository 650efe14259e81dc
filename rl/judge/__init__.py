"""Models that judge answers by a rubric: prompts, verdicts, rounds of judgements, calibration."""
