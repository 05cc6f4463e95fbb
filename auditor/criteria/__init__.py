"""Criteria: what counts as an error of one output, in the user's own terms. Importing this needs no torch."""

from .criterion import KINDS, Criterion
from .parse import criteria_of

__all__ = ["KINDS", "Criterion", "criteria_of"]
