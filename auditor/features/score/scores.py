"""Computes the user's score of the FP32 model, and of the artefact of every verified plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ...errors import MeasureError
from ...isolation.run_model import Around, run_model
from ...plan.context import PlanningContext, emit_plans, plan_of_fp32
from ...records import Evaluation, Plan, Score, Subject
from ...score import NoScore, ScoreFunction, ScoreResult, call_scoring, compare_scores, fp32_score
from ...settings import Settings
from ...verify.artefact import LATER, TIMEOUT, NotHandedOver, Verifier
from ...verify.loaders import in_hand
from ...verify.running import FP32, ModelRuns, Question


@dataclass(frozen=True)
class InFp32:
    """The user's scoring function and its result for the FP32 model, with which every plan is compared."""

    scoring: ScoreFunction
    given: ScoreResult
    evaluation: Evaluation

    def score_of(self, model: nn.Module, around: Around, options: Settings) -> Score:
        """Score a model in the context manager that `around()` returns; compare with the FP32 model's score."""
        given: ScoreResult | str
        most, limit = len(self.given.values), options.timeout or TIMEOUT
        try:
            given = call_scoring(self.scoring, model, seed=options.seed, around=around, most=most, limit=limit)
        except NoScore as error:
            given = str(error)
        return compare_scores(self.scoring, self.given, given)

    def under(
        self, plans: Mapping[str, Plan], planning: PlanningContext, files: Mapping[str, bytes] | None = None
    ) -> dict[str, Plan]:
        """The plans, with scores for verified plans. files: contents of exported programs, by file name."""
        wanted = {name: plan for name, plan in plans.items() if plan.is_verified}
        question = _question(self.scoring, len(self.given.values), planning.options.timeout)
        fresh = self.scoring.place is not None
        result = planning.ask(wanted, question, files, fresh=fresh, later=LATER) if wanted else {}
        scores = {name: compare_scores(self.scoring, self.given, given) for name, given in result.items()}
        return {name: replace(plan, score=scores.get(name)) for name, plan in plans.items()}


def in_fp32(subject: Subject, options: Settings, scoring: ScoreFunction) -> InFp32:
    """Compute the user's score of the FP32 model, in a fresh process if model and function can be imported there.

    Raises: MeasureError(slug="no-score") if the function gives no score.
    """
    plans, batch, seed, device = plan_of_fp32(subject), subject.batches[0], options.seed, options.where
    question = _question(scoring, None, options.timeout)
    result: dict[str, ScoreResult | str] = {}
    if subject.origin is not None and scoring.place is not None:
        expected = run_model(subject.model, batch, seed=seed)
        begun = Verifier.start((batch,), expected=expected, seed=seed, device=device, timeout=options.timeout)
        with suppress(NotHandedOver), begun as (verifier, folder):
            result = verifier.ask(emit_plans(subject, plans, folder), [FP32], question, LATER)
    if not result:
        runs = ModelRuns(partial(in_hand, subject.model, plans), device=device, seed=seed)
        result = {FP32: question(runs, FP32)}
    try:
        if isinstance(given := result[FP32], str):
            raise NoScore(given)
        return InFp32(scoring, given, fp32_score(scoring, given))
    except NoScore as error:
        raise MeasureError(f"{scoring.name} gives no score of the model in FP32: {error}", slug="no-score") from error


def _question(scoring: ScoreFunction, most: int | None, timeout: float | None) -> Question:
    """A Question that calls the scoring function, if possible imported by name. most: number of scores expected."""
    found = scoring if scoring.place is None else scoring.place.text
    return partial(ModelRuns.score, scoring=found, most=most, limit=timeout or TIMEOUT)
