"""Every operation of a run of the user's model, handed to a handler before autograd, autocast and decomposition."""

from .intercept import Handler, intercepted, unfused
from .regions import Region, ambient, region_now

__all__ = ["Handler", "Region", "ambient", "intercepted", "region_now", "unfused"]
