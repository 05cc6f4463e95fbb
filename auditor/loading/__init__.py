"""Load: the TARGET a user names, or a model in hand, becomes a Subject that is known to run."""

from .state import in_eval
from .subject import cautions, check, from_object, load

__all__ = ["cautions", "check", "from_object", "in_eval", "load"]
