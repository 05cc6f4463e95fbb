"""The user's own score of the FP32 model, and of the artefact of every plan that holds the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..artefact.emit import emit
from ..artefact.strategies import SHIPPED
from ..errors import MeasureError
from ..isolation.members import size_of
from ..numerics.formats import DEFAULT, runs
from ..options import Options
from ..pulse import beat
from ..records import Evaluation, Plan, ScopeChoice, Subject
from ..score import Given, Scoring, Unscored, judged, settled
from ..verify import FP32, TIMEOUT, NotHandedOver, Runs, Verifier, counted, in_hand
from .workbench import Workbench, reference


@dataclass(frozen=True)
class InFp32:
    """The FP32 model scored. given: what the function gave, the one half of every pair."""

    scorer: Scorer
    given: Given
    evaluation: Evaluation

    def under(self, plans: Mapping[str, Plan], bench: Workbench) -> dict[str, Plan]:
        """The plans, those that are verified with their scores, in the process that verified them."""
        wanted = {name: plan for name, plan in plans.items() if plan.verified and runs(plan.format)}
        most = len(self.given.values)

        def at_work() -> tuple[Verifier, Path]:
            return bench.verifier, Path(bench.scratch)

        given = self.scorer.given(tuple(wanted), wanted, most, at_work) if wanted else {}
        scores = {name: judged(self.scorer.scoring, self.given, found) for name, found in given.items()}
        return {name: replace(plan, score=scores.get(name)) for name, plan in plans.items()}


def in_fp32(subject: Subject, options: Options) -> InFp32 | None:
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
        with ExitStack() as held:

            def begun() -> tuple[Verifier, Path]:
                where: dict[str, Any] = {"seed": self.seed, "device": self.device, "timeout": self.timeout}
                batches = self.subject.batches[:1]
                expected = reference(self.subject, batches[0], self.seed)
                return held.enter_context(Verifier.begun(batches, expected=expected, **where))

            return self.given((FP32,), raising(self.subject), None, begun)[FP32]

    def given(
        self,
        names: Sequence[str],
        plans: Mapping[str, Plan],
        most: int | None,
        process: Callable[[], tuple[Verifier, Path]],
    ) -> dict[str, Given | str]:
        """What the function gives, by name. process: what runs emitted files, and where these lie, for a model that can be
        made there and a function that is found there."""
        subject, scoring = self.subject, self.scoring
        if subject.origin is not None and scoring.place is not None:
            try:
                verifier, folder = process()
                file = folder / "patched_model.py"
                file.write_text(emit(subject.origin, size_of(subject.model), plans, None, folder), encoding="utf-8")
                return verifier.scores(file, names, scoring, most, lambda words: tell(words, most))
            except NotHandedOver:
                pass
        runs = Runs(partial(in_hand, subject.model, plans), device=self.device, seed=self.seed)
        return {name: self.here(runs, name, most) for name in names}

    def here(self, runs: Runs, name: str, most: int | None) -> Given | str:
        """What the function gives of one of the runs in this process. most: see `tell`."""

        def told(count: int) -> None:
            tell(counted(name, count), most)

        return runs.score(name, self.scoring, most, self.timeout or TIMEOUT, told)


def tell(words: str, most: int | None) -> None:
    """A sign of life, with how far the function is. most: numbers that there will be."""
    beat(f"{words} of {most:,}" if words and most and most > 1 else words)


def raising(subject: Subject) -> dict[str, Plan]:
    """All FP32 under its name, for a model that comes with something stored low; nothing for another one."""
    if subject.raised == "none":
        return {}
    plan = Plan(
        name=FP32,
        strategy=SHIPPED[0],
        format=DEFAULT[0],
        scopes={"": ScopeChoice("fp32")},
        predicted_error=0.0,
        low_precision_flops=0.0,
        predicted_speedup=1.0,
        raised=subject.raised,
        stored_low=subject.stored_low,
    )
    return {FP32: plan}
