"""What plans and baselines are made from, and the batches they are tried on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch

from ..artefact.emit import emit
from ..artefact.strategies import SHIPPED
from ..capture.imitation import Imitation
from ..capture.intercept import intercepted
from ..capture.paths import path_of, usable
from ..devices import is_native
from ..folder import own
from ..isolation.answer import answer
from ..isolation.members import size_of
from ..isolation.outputs import NamedTensors
from ..isolation.process import Flags
from ..measure.calibrate import Calibration
from ..measure.noise import Heard, without_noise
from ..measure.rerun import Yardstick
from ..numerics.formats import DEFAULT
from ..processes import unwound
from ..records import Batch, Capture, Contribution, Distance, Finding, Noise, Plan, ScopeChoice, Subject, Verdict
from ..rulebook.verdicts import Judgement
from ..settings import Settings
from ..verify import FP32, NotHandedOver, Runs, Verifier, in_hand
from .costs import Cost, costs_of
from .modules import Trial
from .problem import Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Workbench:
    """What plans are made from. contributions, verdicts: {format: {node: ...}}. budget: the error that the user allows; floor: how far FP32 is from itself. device: see devices.chosen.

    gpu: the one that times are predicted for, a row of devices.toml. known: {id of a batch: FP32 outputs}, filled as they
    are asked for. with_gradients: see Heard. held: what ends when no more plans are run. timeout: seconds for a plan to answer in a process of its own, where somebody said. objective, quick: see
    Settings. flags: how the caller had set torch to compute FP32.
    """

    subject: Subject
    capture: Capture
    costs: Mapping[str, Cost]
    contributions: Mapping[str, Mapping[str, Contribution]]
    verdicts: Mapping[str, Mapping[str, Verdict]]
    findings: Sequence[Finding]
    distance: Distance
    budget: float
    seed: int
    gpu: str
    device: str
    timeout: float | None = None
    objective: str = "time"
    quick: bool = False
    flags: Flags = field(default_factory=dict)
    floor: Noise = field(default_factory=Noise)
    known: dict[int, list[torch.Tensor]] = field(default_factory=dict, repr=False, compare=False)
    with_gradients: list[torch.Tensor] | str | None = field(default=None, repr=False, compare=False)
    held: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    @property
    def native(self) -> bool:
        """Whether a GPU runs the formats."""
        return is_native(self.device)

    @cached_property
    def most(self) -> int:
        """Operations of a low run of the model beyond which a loop in it is taken for one that does not end."""
        known = {id(batch) for batch in self.usable(self.checks)}  # of the first one's shapes, and on its path
        others = (batch for batch in self.checks if id(batch) not in known)
        return 1_000 + 3 * max(self.capture.operations, *map(self._operations, others), 0)

    def _operations(self, batch: Batch) -> int:
        """How many operations the model takes for a batch."""
        counting = Imitation(lenient=True)
        answer(self.subject.model, batch, seed=self.seed, around=lambda: intercepted(counting))
        return counting.seen

    @property
    def checks(self) -> tuple[Batch, ...]:
        """What patched models are run on: held-out inputs where there are any."""
        return self.subject.held_out or self.subject.batches

    def reference(self, batch: Batch) -> list[torch.Tensor]:
        """FP32 outputs of the model on one of the subject's batches; run once."""
        if id(batch) not in self.known:
            self.known[id(batch)] = reference(self.subject, batch, self.seed)
        return self.known[id(batch)]

    def references(self, batches: Sequence[Batch]) -> list[list[torch.Tensor]]:
        """FP32 outputs of the model on some of the subject's batches; each is run once."""
        return [self.reference(batch) for batch in batches]

    @property
    def graded(self) -> list[torch.Tensor] | None:
        """FP32 outputs for the first check, run with gradients enabled, where plans are run so too."""
        return None if isinstance(self.with_gradients, str) else self.with_gradients

    @property
    def ungraded(self) -> str | None:
        """Why the FP32 model was not run with gradients enabled; None where it was."""
        return self.with_gradients if isinstance(self.with_gradients, str) else None

    @property
    def max_error(self) -> float:
        """The error that a plan may have: the budget, or what is no error where FP32 differs from itself by that much."""
        return max(self.budget, self.floor.floor)

    @cached_property
    def not_fresh(self) -> list[str]:
        """Why plans cannot be verified in a fresh process, where that was tried in vain."""
        return []

    @cached_property
    def scratch(self) -> str:
        """A folder that is there until `held` is closed, or the process is terminated."""
        self.held.enter_context(unwound())
        return self.held.enter_context(tempfile.TemporaryDirectory(prefix=own(), ignore_cleanup_errors=True))

    @cached_property
    def verifier(self) -> Verifier:
        """Runs emitted files in a process of its own, until `held` is closed."""
        verifier = Verifier(
            self.checks,
            Path(self.scratch),
            seed=self.seed,
            device=self.device,
            gradients=self.graded is not None,
            most=self.most,
            timeout=self.timeout,
            expected=self.reference(self.checks[0]),
            noise=self.floor.joint,
        )
        return self.held.enter_context(verifier)

    def ask(
        self,
        plans: Mapping[str, Plan],
        fresh: Callable[[Verifier, Path], dict[str, T]] | None,
        here: Callable[[Runs], dict[str, T]],
    ) -> dict[str, T]:
        """What the artefacts of plans give: of the emitted file in a fresh process, or, for a model that was handed over as an
        object or cannot be had there, of the model patched for a while."""
        if self.subject.origin is not None and not self.not_fresh and fresh is not None:
            try:
                return fresh(self.verifier, emitted(self.subject, plans, self.scratch))
            except NotHandedOver as problem:
                self.not_fresh.append(str(problem))
        gradients = self.graded is not None  # of the model before it is patched
        load = partial(in_hand, self.subject.model, plans)
        return here(Runs(load, self.checks, self.device, self.seed, gradients, self.most))

    def trial(self, batches: Sequence[Batch]) -> Trial:
        """Some batches that the captured graph is valid for, and their FP32 outputs."""
        references = self.references(batches)
        paths = tuple(path_of(self.capture, self.subject, batch) or self.capture for batch in batches)
        about = self.subject.model, tuple(batches), tuple(references), self.distance
        return Trial(self.capture, *about, paths=paths)

    def usable(self, batches: Sequence[Batch]) -> list[Batch]:
        """Those of some batches that the captured graph is valid for."""
        return usable(self.capture, self.subject, batches)

    def problem(self, strategy: str, fmt: str) -> Problem:
        """What a plan under one strategy and format is solved from: the same for all who ask."""
        if (strategy, fmt) not in self._problems:
            measured, subject = (self.costs, self.contributions[fmt], self.verdicts[fmt]), self.subject
            kept_low = subject.raised, subject.stored_low, self.contributions
            problem = Problem(self.capture, *measured, strategy, fmt, self.gpu, *kept_low, self.objective)
            self._problems[strategy, fmt] = problem
        return self._problems[strategy, fmt]

    @cached_property
    def _problems(self) -> dict[tuple[str, str], Problem]:
        return {}


def workbench(
    subject: Subject,
    capture: Capture,
    measured: Calibration,
    judged: Judgement,
    findings: Sequence[Finding],
    options: Settings,
    yardstick: Yardstick,
    flags: Flags,
    noise: Heard,
) -> Workbench:
    """The workbench of an audit: what was measured and judged, by format, and by what outputs are."""
    contributions, verdicts = without_noise(measured.contributions, noise.found), judged.verdicts
    return Workbench(
        subject=subject,
        capture=capture,
        costs=costs_of(capture),
        contributions={fmt: {name: c[fmt] for name, c in contributions.items()} for fmt in options.formats},
        verdicts={fmt: {name: v[fmt] for name, v in verdicts.items()} for fmt in options.formats},
        findings=findings,
        distance=yardstick.distance,
        budget=yardstick.budget,
        seed=options.seed,
        gpu=options.figures,
        device=options.where,
        timeout=options.timeout,
        objective=options.objective,
        quick=options.quick,
        flags=flags,
        floor=noise.found,
        known=noise.known,
        with_gradients=noise.graded,
    )


def reference(subject: Subject, batch: Batch, seed: int = 0) -> NamedTensors:
    """FP32 outputs of the model as it is."""
    return answer(subject.model, batch, seed=seed)


def emitted(subject: Subject, plans: Mapping[str, Plan], folder: str | Path) -> Path:
    """`patched_model.py` with these plans, written into a folder."""
    file = Path(folder, "patched_model.py")
    content = emit(subject.origin, size_of(subject.model), {**plans, **raising(subject)}, None, file.parent)
    file.write_text(content, encoding="utf-8")
    return file


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
