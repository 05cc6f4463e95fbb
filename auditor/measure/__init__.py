"""Measures the error of every operation in every format, forwards and backwards, and its effect on outputs and
gradients."""
