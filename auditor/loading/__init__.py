"""Load: the TARGET a user names, or a model in hand, becomes a Subject that is known to run."""

from .state import in_eval
from .subject import cautions, from_object, load

__all__ = ["cautions", "from_object", "in_eval", "load"]
