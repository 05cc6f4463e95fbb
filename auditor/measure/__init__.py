"""Measures every operation's error in every format, forwards and backwards, and its effect on outputs and gradients."""
