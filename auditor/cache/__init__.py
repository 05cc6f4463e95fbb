"""Measurements kept in a folder from one audit to the next; nothing is taken from there that could have come out otherwise."""
