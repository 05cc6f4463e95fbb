"""The user's own score of a model: their function found, called, and its numbers compared."""

from .calling import Given, Unscored, given_by
from .function import Place, Scoring, in_hand, named
from .paired import judged, settled

__all__ = ["Given", "Place", "Scoring", "Unscored", "given_by", "in_hand", "judged", "named", "settled"]
