"""On-policy distillation: the loop of rl/ with other stages and another loss."""
