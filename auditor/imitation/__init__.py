"""A run of the user's own model, on a CPU, as a GPU would run it."""

from .mode import Imitation, imitated

__all__ = ["Imitation", "imitated"]
