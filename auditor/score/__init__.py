"""The user's own score of a model: their function found, called, and its numbers compared."""

from .calling import Given, Unscored, given_by, judged, settled
from .function import Place, Scoring, in_hand, named

__all__ = ["Given", "Place", "Scoring", "Unscored", "given_by", "in_hand", "judged", "named", "settled"]
