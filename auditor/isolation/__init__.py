"""Runs the user's model from the same state every time, and restores the model bit for bit afterwards."""

from .isolated import isolate

__all__ = ["isolate"]
