"""Results of a replay. Records are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..rehearsal.result import StepFinding
from .capsule import About, plain_exactly


@dataclass(frozen=True)
class Culprit:
    """The operation to blame. words: the operation with module and line; module: its path, None if unknown; line: as
    `train.py:24`; cause: in words, "" if unknown."""

    words: str
    line: str = ""
    module: str | None = None
    cause: str = ""

    @property
    def sentence(self) -> str:
        """The operation and the cause."""
        return f"{self.words}: {self.cause}" if self.cause else self.words


@dataclass(frozen=True)
class Outcome:
    """One run of the step. name: of the recipe. problem: what is wrong, "" if nothing is. loss: NaN without one.
    is_finite: whether loss and gradients are. lost, zero: shares of lost updates, and of gradients that are zero though
    not in FP32; error: of the gradients, relative to FP32's; None where not measured. repairs: name of the recipe
    that this one is to repair."""

    name: str
    title: str
    loss: float
    is_finite: bool
    problem: str = ""
    culprit: Culprit | None = None
    scale: float | None = None
    lost: float | None = None
    zero: float | None = None
    error: float | None = None
    repairs: str = ""


@dataclass(frozen=True)
class Replay:
    """A capsule, replayed. recorded: name of the outcome under the precision of the training. is_reproduced: whether it
    shows what the trigger saw. culprit: the operation to blame, with fails_in_fp32; None if nothing failed.
    findings: mistakes in the step. facts: other sentences on the batch, the weights and the code. repair: the
    name of the outcome that repairs the step; advice: in words. plan: the modules of the repair, by path."""

    capsule: str
    target: str
    about: About
    outcomes: tuple[Outcome, ...]
    recorded: str
    is_reproduced: bool
    verdict: str
    culprit: Culprit | None = None
    fails_in_fp32: bool = False
    findings: tuple[StepFinding, ...] = ()
    facts: tuple[str, ...] = ()
    repair: str = ""
    advice: str = ""
    plan: Mapping[str, str] = field(default_factory=dict)

    def outcome(self, name: str) -> Outcome:
        """The outcome of a recipe. Raises: KeyError."""
        return next(one for one in self.outcomes if one.name == name)

    def to_dict(self) -> dict[str, Any]:
        """All results as JSON data."""
        data: dict[str, Any] = plain_exactly(asdict(self))
        return {"format_version": 1, **data}
