"""Number formats and quantisers: MXFP4, FP8, BF16, FP4 activations and the Hadamard rotation before them."""
