"""Replays the recorded graph under other precisions, with the arithmetic of a GPU."""
