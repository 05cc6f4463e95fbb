"""Replays the recorded graph under other precisions, forwards and backwards, with the arithmetic of a GPU."""
