"""What the user's own function says of a model, in FP32 and under each plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import Written

DIRECTIONS = ("higher", "lower")
"""Which scores are the better ones."""


@dataclass(frozen=True)
class Evaluation:
    """The user's function, what it says of the FP32 model, and how much worse a plan may be."""

    function: Annotated[str, Written("the function, as it was named")]
    better: Annotated[str, Written("which scores are the better ones", choices=DIRECTIONS)]
    max_drop: Annotated[
        float | None,
        Written("how much worse than in FP32 a plan's score may be; `null`: it is reported and not judged", exact=True),
    ]
    score: Annotated[float, Written("of the FP32 model")]
    samples: Annotated[
        int | None,
        Written(
            "how many numbers it is the mean of, a sample's or a batch's each; `null`: the function gave one", least=1
        ),
    ]
    of_mean: Annotated[str | None, Written("the function of that mean that the score is; `null`: the mean itself")]
    calls: Annotated[int, Written("calls of the model that one score takes", least=0)]


@dataclass(frozen=True)
class Score:
    """What the function says of the model under one plan."""

    value: Annotated[
        float | None, Written("of the model under the plan; `null`: there is none, and `failure` says why")
    ]
    difference: Annotated[float | None, Written("`value` minus the FP32 model's score")] = None
    standard_error: Annotated[
        float | None,
        Written(
            "of `difference`, from pairs: the same sample or batch in FP32 and under the plan; `null`: there are none, or "
            "one"
        ),
    ] = None
    passed: Annotated[
        bool | None,
        Written("whether the score is worse by no more than `max_drop`; `null`: none was given, so it is not judged"),
    ] = None
    failure: Annotated[str | None, Written("why there is no score, in one line")] = None

    @property
    def holds(self) -> bool:
        """Whether there is a score, and it is not worse than it may be."""
        return self.failure is None and self.passed is not False
