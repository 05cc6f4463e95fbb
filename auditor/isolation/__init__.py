"""Runs the user's model from the same state every time and restores it bit for bit: `isolated`, `answer`."""

from .isolated import isolated

__all__ = ["isolated"]
