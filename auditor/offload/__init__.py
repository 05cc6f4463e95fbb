"""Disk offload: large tensors in files without names instead of in memory, and a limit to what is resident."""

from .limit import Limit, came_to, fitting, now, onto, resident_limit, within

__all__ = ["Limit", "came_to", "fitting", "now", "onto", "resident_limit", "within"]
