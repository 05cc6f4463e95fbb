"""The user's own score of a model: locates the scoring function, calls it and compares its results."""

from .calling import NoScore, ScoreResult, compare_scores, fp32_score, given_by
from .function import Place, Scoring, find_function, in_hand

__all__ = [
    "NoScore",
    "Place",
    "ScoreResult",
    "Scoring",
    "compare_scores",
    "find_function",
    "fp32_score",
    "given_by",
    "in_hand",
]
