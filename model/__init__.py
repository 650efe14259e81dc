"""DeepSeek-V4: configuration, arithmetic, caches, checkpoints, tokens, training."""
