"""Every run of the user's model starts from the same state and leaves it bit for bit as it was: `isolated`, `answer`."""

from .isolated import isolated

__all__ = ["isolated"]
