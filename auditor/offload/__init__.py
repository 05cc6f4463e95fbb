"""Mapped: large tensors in files without names instead of in memory, and a limit to what of them is resident."""

from .arena import Arena
from .free import fitting
from .limit import Limit, came_to, limited, now, within
from .spilling import Spilling
from .threads import in_this_thread
from .weights import onto

__all__ = ["Arena", "Limit", "Spilling", "came_to", "fitting", "in_this_thread", "limited", "now", "onto", "within"]
