"""A measured model: runs of its artefacts and of its recorded graph, and what plans are made from."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..artefact.emit import emit
from ..artefact.strategies import SHIPPED
from ..capture.paths import path_of, usable
from ..emulation.emulate import Emulation
from ..emulation.intercept import intercept
from ..execution.policy import Policy, plain
from ..execution.replays import Replays
from ..isolation.members import size_of
from ..isolation.outputs import tensor_outputs
from ..isolation.process import Flags
from ..isolation.run_model import Around, run_model
from ..measure.calibrate import Calibration
from ..measure.noise import FP32Runs, without_noise
from ..measure.rerun import OutputMetric
from ..numerics.formats import DEFAULT
from ..records import Batch, Capture, Contribution, Finding, Plan, ScopeChoice, Score, Subject
from ..rulebook.verdicts import Judgement
from ..settings import Settings
from ..stages import beat
from ..verify.artefact import NotHandedOver, Verifier
from ..verify.loaders import PROGRAM, in_hand, load_program
from ..verify.running import FP32, Load, ModelRuns, Question
from .costs import Cost, costs_of
from .problem import Problem


class Scorer(Protocol):
    """Scores a model as the user does, and compares the score with that of the FP32 model."""

    def score_of(self, model: nn.Module, around: Around, options: Settings) -> Score:
        """Score a model in the context manager that `around()` returns."""


class FreshProcess:
    """The process that runs emitted artefacts: started by the first question, ended with the `with` block.

    problems: reasons why the model could not be verified there; empty if it could.
    """

    def __init__(self) -> None:
        self.problems = list[str]()
        self._held = ExitStack()
        self._verifiers = list[tuple[tuple[Batch, ...], Verifier]]()

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._held.__exit__(*raised)

    def verifier(self, batches: tuple[Batch, ...], **settings: Any) -> Verifier:
        """The Verifier that runs artefacts on these batches. settings: those of `Verifier`, for the first question."""
        for known, verifier in self._verifiers:
            if known is batches:
                return verifier
        verifier, _ = self._held.enter_context(Verifier.start(batches, **settings))
        self._verifiers.append((batches, verifier))
        return verifier


@dataclass(frozen=True)
class MeasuredModel:
    """A recorded model with its measurements, before any verdict; runs its artefacts and replays its graph.

    flags: the caller's torch settings for FP32.
    """

    subject: Subject
    capture: Capture
    measured: Calibration
    options: Settings
    output_metric: OutputMetric
    noise: FP32Runs
    flags: Flags = field(default_factory=dict)
    process: FreshProcess = field(default_factory=FreshProcess, repr=False, compare=False)
    replays: Replays = field(default_factory=Replays, repr=False, compare=False)

    @cached_property
    def costs(self) -> Mapping[str, Cost]:
        """{node: its Cost}."""
        return costs_of(self.capture.graph_module.graph)

    @cached_property
    def contributions(self) -> Mapping[str, Mapping[str, Contribution]]:
        """{format: {node or placeholder: its contribution, without FP32's noise}}."""
        result = without_noise(self.measured.contributions, self.noise.measured)
        return {fmt: {name: each[fmt] for name, each in result.items()} for fmt in self.options.formats}

    @cached_property
    def most(self) -> int:
        """Limit of operations in one low-precision run: a run that exceeds the limit counts as an endless loop."""
        operations = [self.capture.operations]
        for batch in self.checks:
            if path_of(self.capture, self.subject, batch) is None:  # other shapes or another path than recorded
                counting = Emulation(lenient=True)
                run_model(self.subject.model, batch, seed=self.options.seed, around=partial(intercept, counting))
                operations.append(counting.seen)
        return 1_000 + 3 * max(operations)

    @property
    def checks(self) -> tuple[Batch, ...]:
        """Batches on which patched models are run: the held-out inputs, or without them the calibration inputs."""
        return self.subject.held_out or self.subject.batches

    def reference(self, batch: Batch) -> list[torch.Tensor]:
        """FP32 outputs of the model on one of the subject's batches; cached."""
        known = self.noise.outputs
        if id(batch) not in known:
            known[id(batch)] = run_model(self.subject.model, batch, seed=self.options.seed, fused=self.noise.fused)
        return known[id(batch)]

    @property
    def graded_outputs(self) -> list[torch.Tensor] | None:
        """FP32 outputs for the first check with gradients enabled; None if plans are not run with gradients enabled."""
        return None if isinstance(self.noise.graded, str) else self.noise.graded

    @property
    def max_error(self) -> float:
        """Largest error that a plan may have: the budget, or the variation of FP32 itself if that is larger."""
        return max(self.output_metric.budget, self.noise.measured.floor)

    @property
    def verifier(self) -> Verifier:
        """Runs emitted files of plans on `checks`, in the fresh process."""
        return self.process.verifier(
            self.checks,
            seed=self.options.seed,
            device=self.options.where,
            gradients=self.graded_outputs is not None,
            most=self.most,
            fused=self.noise.fused,
            timeout=self.options.timeout,
            expected=self.reference(self.checks[0]),
            noise=self.noise.measured.joint,
        )

    def ask(
        self,
        plans: Mapping[str, Plan],
        question: Question,
        files: Mapping[str, bytes] | None = None,
        *,
        names: Sequence[str] | None = None,
        fresh: bool = True,
        later: float = 0.0,
    ) -> dict[str, Any]:
        """Ask `question` about each plan's artefact; return {name of the plan: answer}.

        The emitted file answers in a fresh process. The model is patched in this process instead if it was passed as an
        object or cannot be built elsewhere, or if `fresh` is False. files: contents of plans that are programs, by file
        name. names: names to ask about, by default all plans. later: seconds added to the timeout.
        """
        names = list(names or plans)
        load: Load = partial(in_hand, self.subject.model, plans)
        if files is not None:
            folder = Path(tempfile.mkdtemp(prefix="programs-", dir=self.verifier.scratch))
            for name in plans:
                (folder / f"{name}{PROGRAM}").write_bytes(files[f"{name}{PROGRAM}"])
            load = partial(load_program, folder, self.options.where)
        if fresh and (files is not None or (self.subject.origin is not None and not self.process.problems)):
            try:
                file = folder if files is not None else emit_plans(self.subject, plans, self.verifier.scratch)
                return self.verifier.ask(file, names, question, later)
            except NotHandedOver as problem:
                if files is None:
                    self.process.problems.append(str(problem))
        gradients = self.graded_outputs is not None  # read before the model is patched
        runs = ModelRuns(
            load, self.checks, self.options.where, self.options.seed, gradients, self.most, fused=self.noise.fused
        )
        return {name: question(runs, name) for name in names}

    def replay(self, batches: Sequence[Batch], how: Policy) -> float:
        """Worst error of replays of the recorded graph on the batches that it is valid for; NaN if any error is NaN.

        Raises: UnsupportedInFormat if an operation does not support its format, or the operation's own exception.
        """
        errors = list[float]()
        for batch in batches:
            beat()
            if (path := path_of(self.capture, self.subject, batch)) is not None:
                inputs = path.bind(self.subject.model, batch)
                with torch.no_grad():
                    outputs = self.replays.outputs(id(batch), path, inputs, how)
                errors.append(self.output_metric.distance(self.reference(batch), tensor_outputs(outputs)))
        return worst_of(errors)

    @property
    def replay_batches(self) -> tuple[Batch, ...]:
        """Batches to replay in place of runs: `checks` or, if none can be replayed, the calibration inputs."""
        return self.checks if usable(self.capture, self.subject, self.checks) else self.subject.batches

    def unjudged_problem(self, strategy: str, fmt: str) -> Problem:
        """The optimization problem of a plan under one strategy and format, in which nothing is unsafe."""
        return Problem(
            self.capture,
            self.costs,
            self.contributions,
            {},
            strategy,
            fmt,
            self.options.gpu_spec,
            self.options.objective,
        )


@dataclass(frozen=True)
class PlanningContext(MeasuredModel):
    """Inputs for making plans: the measured model, with its verdicts and findings. scorer: the user's score, if any."""

    judged: Judgement = field(kw_only=True)
    findings: Sequence[Finding] = field(kw_only=True)
    scorer: Scorer | None = field(default=None, kw_only=True)

    @classmethod
    def of(
        cls, model: MeasuredModel, judged: Judgement, findings: Sequence[Finding], scorer: Scorer | None = None
    ) -> PlanningContext:
        """A copy of a measured model with its verdicts and findings, which uses the same fresh process for its runs."""
        shared = {each.name: getattr(model, each.name) for each in fields(model)}
        return cls(**shared, judged=judged, findings=findings, scorer=scorer)

    def problem(self, strategy: str, fmt: str) -> Problem:
        """The optimization problem of a plan under one strategy and format."""
        unjudged = self.unjudged_problem(strategy, fmt)
        low = unjudged.resolve(plain(fmt))  # autocast runs recurrent layers in FP16: their FP16 verdict counts
        verdicts = {
            name: by_format[unjudged.computed_in(low, name)] for name, by_format in self.judged.verdicts.items()
        }
        return replace(unjudged, verdicts=verdicts)


def worst_of(values: Sequence[float]) -> float:
    """The largest value; NaN, which fails every threshold, if any value is NaN; 0 without values."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def emit_plans(subject: Subject, plans: Mapping[str, Plan], folder: str | Path) -> Path:
    """Write `patched_model.py` with these plans into a folder; returns the file's path."""
    file = Path(folder, "patched_model.py")
    content = emit(subject.origin, size_of(subject.model), {**plans, **plan_of_fp32(subject)}, None, file.parent)
    file.write_text(content, encoding="utf-8")
    return file


def plan_of_fp32(subject: Subject) -> dict[str, Plan]:
    """{FP32: a plan with everything in FP32} if the model has FP16 or BF16 tensors; otherwise {}."""
    if subject.upcast == "none":
        return {}
    plan = Plan(FP32, SHIPPED[0], DEFAULT[0], {"": ScopeChoice("fp32")})
    return {FP32: replace(plan, upcast=subject.upcast, stored_low=subject.stored_low)}


def in_unit(calibration: Calibration, unit: float) -> Calibration:
    """A copy of `calibration` whose contributions are multiplied by `unit`; errors do not change."""

    def scale(effect: Contribution) -> Contribution:
        return replace(effect, isolated=effect.isolated * unit, own=effect.own * unit, cast=effect.cast * unit)

    contributions = dict[str, dict[str, Contribution]]()
    for name, formats in calibration.contributions.items():
        contributions[name] = {fmt: scale(effect) for fmt, effect in formats.items()}
    return replace(calibration, contributions=contributions)
