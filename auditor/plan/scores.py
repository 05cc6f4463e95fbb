"""The user's own score of the FP32 model, and of the artefact of every plan that holds the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..errors import MeasureError
from ..records import Evaluation, Plan, Subject
from ..score import NoScore, ScoreResult, Scoring, compare_scores, fp32_score
from ..settings import Settings
from ..stages import beat
from ..verify import FP32, TIMEOUT, NotHandedOver, Runs, Verifier, in_hand, progress_text
from .workbench import Fresh, Here, Workbench, emitted, raising, reference

Found = ScoreResult | str
"""What the function gives of the model under one plan, or why nothing."""


@dataclass(frozen=True)
class InFp32:
    """The user's function, and what it gave of the FP32 model: the one half of every pair. timeout: as of verification."""

    scoring: Scoring
    given: ScoreResult
    evaluation: Evaluation
    timeout: float | None

    def under(
        self, plans: Mapping[str, Plan], bench: Workbench, files: Mapping[str, bytes] | None = None
    ) -> dict[str, Plan]:
        """The plans, those that are verified with their scores. files: see Workbench.ask."""
        wanted = {name: plan for name, plan in plans.items() if plan.verified}
        questions = _questions(self.scoring, list(wanted), len(self.given.values), self.timeout)
        result = bench.ask(wanted, *questions, files) if wanted else {}
        scores = {name: compare_scores(self.scoring, self.given, given) for name, given in result.items()}
        return {name: replace(plan, score=scores.get(name)) for name, plan in plans.items()}


def in_fp32(subject: Subject, options: Settings) -> InFp32 | None:
    """What the user's function says of the FP32 model, in a process of its own where it can be made there; None where there is
    no function.

    Raises: MeasureError(slug="no-score") where it says nothing.
    """
    if (scoring := options.scoring) is None:
        return None
    plans, seed, device = raising(subject), options.seed, options.where
    fresh, here = _questions(scoring, [FP32], None, options.timeout)
    result: dict[str, Found] = {}
    if subject.origin is not None and fresh is not None:
        expected = reference(subject, subject.batches[0], seed)
        begun = Verifier.start(
            subject.batches[:1], expected=expected, seed=seed, device=device, timeout=options.timeout
        )
        with suppress(NotHandedOver), begun as (verifier, folder):
            result = fresh(verifier, emitted(subject, plans, folder))
    result = result or here(Runs(partial(in_hand, subject.model, plans), device=device, seed=seed))
    try:
        if isinstance(given := result[FP32], str):
            raise NoScore(given)
        return InFp32(scoring, given, fp32_score(scoring, given), options.timeout)
    except NoScore as error:
        raise MeasureError(f"{scoring.name} gives no score of the model in FP32: {error}", slug="no-score") from error


def _questions(
    scoring: Scoring, names: Sequence[str], most: int | None, timeout: float | None
) -> tuple[Fresh[Found] | None, Here[Found]]:
    """The function called under plans: in another process, where it can be found there, and in this one. most: how many numbers
    there will be."""

    def tell(words: str) -> None:
        beat(f"{words} of {most:,}" if words and most and most > 1 else words)

    def fresh(verifier: Verifier, file: Path) -> dict[str, Found]:
        return verifier.scores(file, names, scoring, most, tell)

    def one(runs: Runs, name: str) -> Found:
        return runs.score(name, scoring, most, timeout or TIMEOUT, lambda count: tell(progress_text(name, count)))

    return fresh if scoring.place is not None else None, lambda runs: {name: one(runs, name) for name in names}
