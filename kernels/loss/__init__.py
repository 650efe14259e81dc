"""Log-probabilities and losses over the vocabulary."""
