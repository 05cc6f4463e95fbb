"""Number formats, rounding to them, and the error and magnitudes of tensors."""
