"""Every run starts from the same state and leaves it bit for bit as it was: `isolated`."""

from .isolated import isolated

__all__ = ["isolated"]
