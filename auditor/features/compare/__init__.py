"""Compares two runs of a model: whether they compute the same function, and where they part."""
