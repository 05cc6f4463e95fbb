"""The user's own score of the FP32 model, and of the artefact of every plan that holds the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import MeasureError
from ..numerics.formats import runs
from ..records import Evaluation, Plan, Subject
from ..score import Given, Scoring, Unscored, judged, settled
from ..settings import Settings
from ..stages import beat
from ..verify import FP32, TIMEOUT, NotHandedOver, Runs, Verifier, counted, in_hand
from .workbench import Workbench, emitted, raising, reference


@dataclass(frozen=True)
class InFp32:
    """The FP32 model scored. given: what the function gave, the one half of every pair."""

    scorer: Scorer
    given: Given
    evaluation: Evaluation

    def under(self, plans: Mapping[str, Plan], bench: Workbench) -> dict[str, Plan]:
        """The plans, those that are verified with their scores, in the process that verified them."""
        wanted = {name: plan for name, plan in plans.items() if plan.verified and runs(plan.format)}
        scorer, most = self.scorer, len(self.given.values)
        fresh = partial(scorer.fresh, tuple(wanted), most) if scorer.scoring.place is not None else None
        given: dict[str, Given | str] = {}
        if wanted:
            given = bench.ask(wanted, fresh, lambda runs: {name: scorer.here(runs, name, most) for name in wanted})
        scores = {name: judged(scorer.scoring, self.given, found) for name, found in given.items()}
        return {name: replace(plan, score=scores.get(name)) for name, plan in plans.items()}


def in_fp32(subject: Subject, options: Settings) -> InFp32 | None:
    """What the user's function says of the FP32 model; None where there is no function.

    Raises: MeasureError(slug="no-score") where it says nothing.
    """
    if (scoring := options.scoring) is None:
        return None
    scorer = Scorer(subject, scoring, options.seed, options.where, options.timeout)
    given = scorer.of_fp32()
    try:
        if isinstance(given, str):
            raise Unscored(given)
        return InFp32(scorer, given, settled(scoring, given))
    except Unscored as error:
        raise MeasureError(f"{scoring.name} gives no score of the model in FP32: {error}", slug="no-score") from error


@dataclass(frozen=True)
class Scorer:
    """Calls the user's function on the subject's model. device, timeout: as of verification."""

    subject: Subject
    scoring: Scoring
    seed: int
    device: str
    timeout: float | None

    def of_fp32(self) -> Given | str:
        """What the function gives of the FP32 model, in a process of its own where it can be made there."""
        subject, plans = self.subject, raising(self.subject)
        if subject.origin is not None and self.scoring.place is not None:
            expected = reference(subject, subject.batches[0], self.seed)
            where: dict[str, Any] = {"seed": self.seed, "device": self.device, "timeout": self.timeout}
            with (
                suppress(NotHandedOver),
                Verifier.begun(subject.batches[:1], expected=expected, **where) as (verifier, folder),
            ):
                return self.fresh((FP32,), None, verifier, emitted(subject, plans, folder))[FP32]
        runs = Runs(partial(in_hand, subject.model, plans), device=self.device, seed=self.seed)
        return self.here(runs, FP32, None)

    def fresh(self, names: Sequence[str], most: int | None, verifier: Verifier, file: Path) -> dict[str, Given | str]:
        """What the function gives of the plans of an emitted file, in another process. most: see `tell`."""
        return verifier.scores(file, names, self.scoring, most, lambda words: tell(words, most))

    def here(self, runs: Runs, name: str, most: int | None) -> Given | str:
        """What the function gives of one of the runs in this process. most: see `tell`."""

        def told(count: int) -> None:
            tell(counted(name, count), most)

        return runs.score(name, self.scoring, most, self.timeout or TIMEOUT, told)


def tell(words: str, most: int | None) -> None:
    """A sign of life, with how far the function is. most: numbers that there will be."""
    beat(f"{words} of {most:,}" if words and most and most > 1 else words)
