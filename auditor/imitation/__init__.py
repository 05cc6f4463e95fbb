"""A run of the user's own model, on a CPU, as a GPU would run it."""

from .body import DEVICES, imitated
from .mode import Imitation

__all__ = ["DEVICES", "Imitation", "imitated"]
