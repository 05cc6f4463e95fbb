"""Criteria: limits that the user sets on the error of one output. Importing this package needs no torch."""

from .criterion import KINDS, Criterion, criteria_of

__all__ = ["KINDS", "Criterion", "criteria_of"]
