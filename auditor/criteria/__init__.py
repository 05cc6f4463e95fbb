"""Criteria: what counts as an error of one output, in the user's own terms. Importing this needs no torch."""

from .criterion import Criterion
from .kinds import KINDS
from .parse import criteria_of

__all__ = ["KINDS", "Criterion", "criteria_of"]
