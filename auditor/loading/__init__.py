"""Loads the user's TARGET, or takes a live model, and runs it once; the result is a Subject."""

from .state import in_eval
from .subject import cautions, from_object, load

__all__ = ["cautions", "from_object", "in_eval", "load"]
