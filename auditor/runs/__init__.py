"""The model run as its user calls it, and what counts as its output."""
