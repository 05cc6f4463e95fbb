"""Runs the user's model from the same state every time, and restores the model bit for bit afterwards."""

from .isolated import in_eval, in_training, isolate

__all__ = ["in_eval", "in_training", "isolate"]
