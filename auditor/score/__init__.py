"""The user's own score of a model: locates the scoring function, calls it and compares its results."""

from .calling import (
    NoScore,
    ScoreResult,
    Scoring,
    call_scoring,
    compare_scores,
    find_function,
    fp32_score,
    in_hand,
)

__all__ = [
    "NoScore",
    "ScoreResult",
    "Scoring",
    "call_scoring",
    "compare_scores",
    "find_function",
    "fp32_score",
    "in_hand",
]
