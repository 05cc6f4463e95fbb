"""Numerics: number formats, rounding and error metrics, and every ATen operation as a GPU computes it in a format."""
