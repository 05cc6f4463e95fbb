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
    question = _question(scoring, None, options.timeout)
    score = None
    if subject.origin is not None and scoring.place is not None:
        score = _score_in_fresh_process(subject, options, question)
    if score is None:
        plans = plan_of_fp32(subject)
        in_this_process = partial(in_hand, subject.model, plans)
        score = question(ModelRuns(in_this_process, device=options.where, seed=options.seed), FP32)
    try:
        if isinstance(score, str):
            raise NoScore(score)
        return InFp32(scoring, score, fp32_score(scoring, score))
    except NoScore as error:
        raise MeasureError(f"{scoring.name} gives no score of the model in FP32: {error}", slug="no-score") from error


def _score_in_fresh_process(subject: Subject, options: Settings, question: Question) -> ScoreResult | str | None:
    """The score, or why there is none; None if the model cannot be handed over to another process."""
    plans = plan_of_fp32(subject)
    batch = subject.batches[0]
    expected = run_model(subject.model, batch, seed=options.seed)
    begun = Verifier.start(
        (batch,), expected=expected, seed=options.seed, device=options.where, timeout=options.timeout
    )
    with suppress(NotHandedOver), begun as (verifier, folder):
        answers = verifier.ask(emit_plans(subject, plans, folder), [FP32], question, LATER)
        return answers.get(FP32)
    return None


def _question(scoring: ScoreFunction, most: int | None, timeout: float | None) -> Question:
    """A Question that calls the scoring function, if possible imported by name. most: number of scores expected."""
    scoring_function = scoring if scoring.place is None else scoring.place.text
    return partial(ModelRuns.score, scoring=scoring_function, most=most, limit=timeout or TIMEOUT)
