"""The inputs from which plans and baselines are made: the budget in the user's metric, measurements in its unit, and the
batches on which plans are run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ..artefact.emit import emit
from ..artefact.strategies import SHIPPED
from ..capture.emulation import Emulation
from ..capture.intercept import intercept
from ..capture.paths import path_of, usable
from ..criteria.criterion import name_of
from ..criteria.defaults import by_default, may_flip
from ..criteria.measure import criteria_for
from ..errors import CallbackError, let_through
from ..execution.execute import Executor
from ..execution.policy import Policy, plain
from ..isolation.answer import answer
from ..isolation.members import size_of
from ..isolation.outputs import on_cpu, tensor_outputs
from ..isolation.process import Flags
from ..loading.target import blame
from ..measure.calibrate import Calibration
from ..measure.noise import FP32Runs, without_noise
from ..measure.rerun import Yardstick
from ..numerics.casting import round_tree
from ..numerics.formats import DEFAULT, FORMATS
from ..numerics.metrics import output_error
from ..records import Batch, Capture, Contribution, Distance, Finding, Plan, ScopeChoice, Subject
from ..rulebook.verdicts import Judgement
from ..settings import Settings
from ..stages import beat
from ..verify.artefact import NotHandedOver, Verifier
from ..verify.loaders import PROGRAM, in_hand, load_program
from ..verify.running import FP32, Load, Question, Runs
from .costs import Cost, costs_of
from .problem import Problem

LARGEST_BUDGET = 100.0
"""Above this error budget, contributions are not converted to the metric's unit, where they could reach FORBIDDEN."""


@dataclass(frozen=True)
class Workbench:
    """Inputs for making plans: the recording, measurements, verdicts and options. flags: the caller's torch settings
    for FP32. held: an ExitStack, which ends the verifier's process when closed."""

    subject: Subject
    capture: Capture
    measured: Calibration
    judged: Judgement
    findings: Sequence[Finding]
    options: Settings
    yardstick: Yardstick
    noise: FP32Runs
    flags: Flags = field(default_factory=dict)
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)
    not_fresh: list[str] = field(default_factory=list, init=False, compare=False)
    """Reasons why verification in a fresh process failed; empty if it did not fail."""

    @cached_property
    def costs(self) -> Mapping[str, Cost]:
        """{node: its Cost}."""
        return costs_of(self.capture.graph_module.graph)

    @cached_property
    def contributions(self) -> Mapping[str, Mapping[str, Contribution]]:
        """{format: {node or placeholder: its contribution, without FP32's noise}}."""
        result = without_noise(self.measured.contributions, self.noise.found)
        return {fmt: {name: each[fmt] for name, each in result.items()} for fmt in self.options.formats}

    @cached_property
    def most(self) -> int:
        """Limit of operations in one low-precision run: a run that exceeds the limit counts as an endless loop."""
        known, operations = {id(batch) for batch in self.usable(self.checks)}, [self.capture.operations]
        for batch in self.checks:
            if id(batch) not in known:  # the batch has other shapes or another path than the first
                counting = Emulation(lenient=True)
                answer(self.subject.model, batch, seed=self.options.seed, around=partial(intercept, counting))
                operations.append(counting.seen)
        return 1_000 + 3 * max(operations)

    @property
    def checks(self) -> tuple[Batch, ...]:
        """Batches on which patched models are run: the held-out inputs, or without them the calibration inputs."""
        return self.subject.held_out or self.subject.batches

    def reference(self, batch: Batch) -> list[torch.Tensor]:
        """FP32 outputs of the model on one of the subject's batches; cached."""
        known = self.noise.known
        if id(batch) not in known:
            known[id(batch)] = answer(self.subject.model, batch, seed=self.options.seed)
        return known[id(batch)]

    @property
    def graded_outputs(self) -> list[torch.Tensor] | None:
        """FP32 outputs for the first check with gradients enabled; None if plans are not run with gradients enabled."""
        return None if isinstance(self.noise.graded, str) else self.noise.graded

    @property
    def max_error(self) -> float:
        """Largest error that a plan may have: the budget, or the variation of FP32 itself if that is larger."""
        return max(self.yardstick.budget, self.noise.found.floor)

    @cached_property
    def verifier(self) -> Verifier:
        """The process that runs emitted files of plans; it ends when the ExitStack `held` is closed."""
        begun = Verifier.start(
            self.checks,
            seed=self.options.seed,
            device=self.options.where,
            gradients=self.graded_outputs is not None,
            most=self.most,
            timeout=self.options.timeout,
            expected=self.reference(self.checks[0]),
            noise=self.noise.found.joint,
        )
        return self.held.enter_context(begun)[0]

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
        object or cannot be built elsewhere, or if `fresh` is False. files: contents of plans that are
        programs, by file name. names: names to ask about, by default all plans. later: extra seconds.
        """
        names = list(names or plans)
        load: Load = partial(in_hand, self.subject.model, plans)
        if files is not None:
            folder = Path(tempfile.mkdtemp(prefix="programs-", dir=self.verifier.scratch))
            for name in plans:
                (folder / f"{name}{PROGRAM}").write_bytes(files[f"{name}{PROGRAM}"])
            load = partial(load_program, folder, self.options.where)
        if fresh and (files is not None or (self.subject.origin is not None and not self.not_fresh)):
            try:
                file = folder if files is not None else emit_plans(self.subject, plans, self.verifier.scratch)
                return self.verifier.ask(file, names, question, later)
            except NotHandedOver as problem:
                if files is None:
                    self.not_fresh.append(str(problem))
        gradients = self.graded_outputs is not None  # read before the model is patched
        runs = Runs(load, self.checks, self.options.where, self.options.seed, gradients, self.most)
        return {name: question(runs, name) for name in names}

    def replay(self, batches: Sequence[Batch], how: Policy) -> float:
        """Worst error of replays of the recorded graph on batches that it is valid for; NaN if any error is NaN.

        Raises: UnsupportedInFormat if an operation does not support its format, or the operation's own exception.
        """
        errors = list[float]()
        for batch in batches:
            beat()
            path = path_of(self.capture, self.subject, batch) or self.capture
            with torch.no_grad():
                outputs = Executor(path.graph_module, how).run(*path.bind(self.subject.model, batch))
            errors.append(self.yardstick.distance(self.reference(batch), tensor_outputs(outputs)))
        return worst_of(errors)

    def usable(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches that the recorded graph is valid for."""
        return usable(self.capture, self.subject, batches)

    def problem(self, strategy: str, fmt: str) -> Problem:
        """The optimization problem of a plan under one strategy and format."""
        asked = strategy, fmt, self.options.figures, self.options.objective
        found = Problem(self.capture, self.costs, self.contributions, {}, *asked)
        low = found.resolve(plain(fmt))  # autocast runs recurrent layers in FP16: their FP16 verdict counts
        verdicts = {name: each[found.computed_in(low, name)] for name, each in self.judged.verdicts.items()}
        return replace(found, verdicts=verdicts)


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
    if subject.raised == "none":
        return {}
    plan = Plan(FP32, SHIPPED[0], DEFAULT[0], {"": ScopeChoice("fp32")})
    return {FP32: replace(plan, raised=subject.raised, stored_low=subject.stored_low)}


def yardstick_of(subject: Subject, options: Settings, capture: Capture) -> Yardstick:
    """The error budget and its metric: relative L2, the user's metric, or shares of criteria's limits (the user's, and
    the default ones for discrete outputs).

    Raises: AuditorError(slug="bad-criterion") if a criterion does not fit the model's outputs;
    CallbackError(slug="bad-callback") if the user's metric fails.
    """
    metric, criteria, max_error = options.metric, options.limits, options.max_error
    flips = metric is None and may_flip(capture)
    if metric is None and not criteria and not flips:
        return Yardstick(max_error)
    outputs = answer(subject.model, subject.batches[0], seed=options.seed)
    metric = _of_the_cpu(metric) if metric is not None else None
    if flips:
        criteria = (*criteria, *by_default(criteria, outputs, capture))
    if criteria:
        return Yardstick(1.0, criteria_for(criteria, max_error, outputs, metric))
    return Yardstick(max_error) if metric is None else Yardstick(max_error, metric, unit_of(metric, outputs, max_error))


def _of_the_cpu(metric: Distance) -> Distance:
    """The user's metric, called with all outputs on the CPU.

    The result raises CallbackError(slug="bad-callback") if the metric raises on finite outputs or returns no number.
    """
    name = name_of(metric)

    def measure_on_cpu(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
        try:
            result: Any = metric(on_cpu(reference), on_cpu(candidate))
        except Exception as error:
            let_through(error)
            if not math.isfinite(output_error(reference, candidate)):
                return math.nan  # a metric may raise on non-finite outputs, which fail every budget
            raise CallbackError(
                f"metric={name} raised {blame(error)}: it is called as metric(reference, candidate) with two lists of tensors",
                slug="bad-callback",
            ) from error
        with suppress(TypeError, ValueError, RuntimeError):
            return float(result)  # also of a tensor or an array with one entry
        words = "None" if result is None else f"a value of type {type(result).__name__}"
        raise CallbackError(f"metric={name} returned {words}: return one number; smaller is better", "bad-callback")

    measure_on_cpu.__name__ = name
    return measure_on_cpu


def unit_of(metric: Distance, reference: Sequence[torch.Tensor], max_error: float) -> float:
    """Value of the metric per unit of relative L2 error, from the outputs rounded to BF16.

    The result is 1 if that value is not positive and finite (a metric that counts flips may be 0), or if the budget
    exceeds LARGEST_BUDGET.
    """
    rounded = [round_tree(output, FORMATS["bf16"]) for output in reference]
    relative, measured = output_error(reference, rounded), metric(reference, rounded)
    if not (0 < relative < math.inf and 0 < measured < math.inf and max_error <= LARGEST_BUDGET):
        return 1.0
    return measured / relative


def in_unit(found: Calibration, unit: float) -> Calibration:
    """A copy of `found` whose contributions are multiplied by `unit`; errors do not change."""

    def scale(one: Contribution) -> Contribution:
        return replace(one, isolated=one.isolated * unit, own=one.own * unit, cast=one.cast * unit)

    known = found.contributions.items()
    return replace(found, contributions={name: {fmt: scale(one) for fmt, one in each.items()} for name, each in known})
