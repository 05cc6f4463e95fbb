"""Runs the user's model from the same state every time and restores it bit for bit: `isolate`, `answer`."""

from .isolated import isolate

__all__ = ["isolate"]
