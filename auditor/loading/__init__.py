"""Load: the TARGET a user names, or a model in hand, becomes a Subject that is known to run."""

from .caveats import cautions
from .state import in_eval
from .subject import check, from_object, load

__all__ = ["cautions", "check", "from_object", "in_eval", "load"]
