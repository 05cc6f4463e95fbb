"""What staying in FP32 costs: the predicted time that each owner would save if its own operations ran low."""

from __future__ import annotations

from ..replay.chosen import labelled
from .costs import seconds
from .problem import Problem
from .solve import Candidate
from .terms import timed_in


def savings(problem: Problem, chosen: Candidate) -> dict[str, float]:
    """{owner: share of the candidate's predicted time}; casts, which depend on the neighbours, are not counted."""
    now = problem.resolve(labelled(chosen.precision))
    low = problem.lowest.resolution
    saved = dict.fromkeys(chosen.precision, 0.0)
    for name, node in problem.capture.nodes.items():
        cost = problem.costs[name]
        before, after = (seconds(cost, timed_in(each, name), problem.device) for each in (now, low))
        saved[node.owner] = saved.get(node.owner, 0.0) + before - after
    return {owner: time / chosen.seconds if chosen.seconds else 0.0 for owner, time in saved.items()}
