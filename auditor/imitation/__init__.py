"""A run of the user's own model, on a CPU, as a GPU would run it."""

from .body import DEVICES, as_on, imitated
from .mode import Imitation

__all__ = ["DEVICES", "Imitation", "as_on", "imitated"]
