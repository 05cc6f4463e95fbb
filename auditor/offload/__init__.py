"""Disk offload: large tensors live in temporary files; resident memory is capped."""

from .limit import Limit, came_to, limit_for, now, onto, resident_limit, within

__all__ = ["Limit", "came_to", "limit_for", "now", "onto", "resident_limit", "within"]
