"""Every operation of a run of the user's model, handed to a handler before autograd, autocast and decomposition."""

from __future__ import annotations

from .handler import Busy, Handler, Traced, uncompiled, unfused
from .intercept import intercepted
from .regions import Region, ambient, cast_weight, region_now

__all__ = [
    "Busy",
    "Handler",
    "Region",
    "Traced",
    "ambient",
    "cast_weight",
    "intercepted",
    "region_now",
    "uncompiled",
    "unfused",
]
