"""What an optimizer step computes beyond elementwise arithmetic: orthogonal directions, unbiased rounding."""
