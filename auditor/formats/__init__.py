"""Number formats, rounding to them, and the error and magnitudes of tensors. A format of one's own is registered here."""

from .table import FORMATS, Format, register, registered

__all__ = ["FORMATS", "Format", "register", "registered"]
