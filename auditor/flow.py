"""The whole flow, stage by stage: a Subject goes in, an Audit comes out."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import __version__
from .config import EVERYTHING, Selection
from .errors import AuditorError
from .facts import gather
from .formats.metrics import output_error
from .judge.classify import classify
from .judge.findings import confronted, silenced
from .judge.verdicts import Judgement, judge
from .load import in_eval
from .measure.calibrate import Calibration, calibrate
from .measure.regions import run_regions
from .plan.baselines import baselines_of
from .plan.choose import Distance
from .plan.costs import DEFAULT_DEVICE, Cost, costs_of
from .plan.plans import as_run, parameters_of, plans_of, recommend
from .plan.units import in_unit, unit_of
from .plan.workbench import Workbench, reference
from .records import Capture, Finding, NodeReport, Progress, Subject, Weight
from .records.audit import Audit, Environment
from .replay.depth import plan_errors
from .replay.strategies import STRATEGIES
from .resources import table
from .rulebook import Rule
from .state.process import untouched
from .tape import capture
from .training.nodes import with_backward
from .training.stage import conclude, prepare


def run(
    subject: Subject,
    *,
    formats: tuple[str, ...],
    max_error: float,
    device: str,
    strategies: tuple[str, ...],
    mode: str,
    rules: Sequence[Rule],
    seed: int,
    progress: Progress | None,
    command: str,
    metric: Distance | None = None,
    target: str = DEFAULT_DEVICE,
    selection: Selection = EVERYTHING,
) -> Audit:
    """Audit a subject; its model, and the process's global state, come back as they were.

    Raises: AuditorError (its slug names the condition).
    """
    _check_options(formats, strategies, max_error, mode)
    _check_target(target)
    native = _device(device) == "cuda"
    stages = _Stages(progress)
    with untouched(seed), in_eval(subject.model):
        subject = _on_cuda(subject) if native else subject
        with stages("capture", subject.name):
            captured = capture(subject, formats, seed)
        with stages("measure", f"{len(captured.nodes)} nodes", len(captured.nodes)):
            measured = found = calibrate(captured, subject, formats, seed, stages.tick)
        if metric is not None:
            found = in_unit(measured, unit_of(metric, reference(subject, subject.batches[0], seed), max_error))
        judged = judge(captured, found, formats, max_error)
        with stages("regions", "flagged nodes that lie together"):
            regions = run_regions(captured, subject.model, subject.batches[0], measured, judged.verdicts, formats)
        prepared = None
        if mode == "training":
            with stages("training", "the FP32 step"):
                prepared = prepare(subject, formats, seed, stages.tick)
            judged = with_backward(judged, captured, prepared.nodes, prepared.capture)
        with stages("classify", f"{len(rules)} rules"):
            facts = gather(captured, subject.model, found.ranges, judged.verdicts)
            findings = silenced(confronted(classify(captured, facts, rules), judged.verdicts), selection, rules)
        costs = costs_of(captured)
        bench = Workbench(
            subject=subject,
            capture=captured,
            costs=costs,
            contributions={fmt: {name: c[fmt] for name, c in found.contributions.items()} for fmt in formats},
            verdicts={fmt: {name: v[fmt] for name, v in judged.verdicts.items()} for fmt in formats},
            findings=findings,
            distance=metric or output_error,
            max_error=max_error,
            seed=seed,
            target=target,
            native=native,
        )
        with stages("baseline", "plain autocast, plain cast"):
            baselines = baselines_of(bench, strategies, formats)
        with stages("plan", "solve, patch, verify"):
            plans = plans_of(bench, strategies, formats, baselines, stages.tick)
        recommended, reason = recommend(plans, max_error)
        chosen = plans.get(recommended or "")
        along = plan_errors(captured, subject.model, subject.batches[0], chosen) if chosen else {}
        training = None
        if prepared is not None:
            with stages("low steps", "FP16 and BF16 training steps"):
                training = conclude(prepared, plans, recommended, stages.tick)
    by_node = _rules_by_node(findings)
    return Audit(
        subject=subject,
        parameters=parameters_of(subject),
        inputs=_described_inputs(subject),
        environment=_environment(native, seed),
        formats=formats,
        max_error=max_error,
        metric=getattr(metric, "__name__", "custom metric") if metric else "relative L2 of the outputs",
        capture_method=captured.method,
        nodes=tuple(_report(captured, found, judged, by_node, costs, name) for name in captured.nodes),
        findings=findings,
        plans=plans,
        baselines=as_run(baselines, plans),
        recommended=recommended,
        recommendation=reason,
        seconds=stages.seconds,
        warnings=(*subject.warnings, *captured.warnings, *_unheld(subject)),
        command=command,
        plan_errors=along,
        weights=_weights(captured, found),
        regions=regions,
        training=training,
    )


@dataclass
class _Stages:
    """Times the stages and tells the progress callback where the audit is."""

    progress: Progress | None
    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""
    done: int = 0
    total: int = 0

    @contextmanager
    def __call__(self, stage: str, detail: str, total: int = 0) -> Iterator[None]:
        self.current, self.done, self.total = stage, 0, total
        self._say(detail)
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start

    def tick(self, detail: str) -> None:
        self.done += 1
        self._say(detail)

    def _say(self, detail: str) -> None:
        if self.progress is not None:
            self.progress(self.current, detail, min(self.done, self.total) if self.total else 0, self.total)


def _check_options(formats: Sequence[str], strategies: Sequence[str], max_error: float, mode: str) -> None:
    wrong = [name for name in formats if name not in ("fp16", "bf16")]
    if wrong or not formats:
        raise AuditorError(f"formats are fp16 and bf16, not {', '.join(wrong) or 'none'}", slug="bad-option")
    wrong = [name for name in strategies if name not in STRATEGIES]
    if wrong or not strategies:
        raise AuditorError(f"strategies are autocast and cast, not {', '.join(wrong) or 'none'}", slug="bad-option")
    if not 0 < max_error < float("inf"):
        raise AuditorError(f"max_error is a positive number, not {max_error}", slug="bad-option")
    if mode not in ("inference", "training"):
        raise AuditorError(f"modes are inference and training, not {mode}", slug="bad-option")


def _check_target(target: str) -> None:
    known = table("plan/devices")
    if target not in known:
        raise AuditorError(
            f"there are no figures for {target!r}: target is one of {', '.join(known)}", slug="bad-option"
        )


def _device(device: str) -> str:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise AuditorError("cuda was asked for, but torch sees no CUDA device: use cpu or auto", slug="no-cuda")
    return "cuda" if device == "cuda" or (device == "auto" and available) else "cpu"


def _on_cuda(subject: Subject) -> Subject:
    def moved(batches: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda x: x.cuda(), batches)

    model = _copied(subject.model).cuda()
    objective = subject.objective
    if objective is not None:
        loss_fn = objective.loss_fn
        loss_fn = _copied(loss_fn).cuda() if isinstance(loss_fn, torch.nn.Module) else loss_fn
        objective = replace(objective, loss_fn=loss_fn, targets=moved(objective.targets))
    batches, held_out = moved(subject.batches), moved(subject.held_out)
    return replace(subject, model=model, batches=batches, held_out=held_out, objective=objective)


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that can be moved: none of its modules and parameters is the caller's. Raises: AuditorError("no-copy")."""
    advice = "audit it with device='cpu'"
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise AuditorError(
            f"{type(module).__name__} cannot be copied to the GPU ({reason}): {advice}", "no-copy"
        ) from error
    own = {id(part) for part in (*module.modules(), *module.parameters())}
    if any(id(part) in own for part in (*twin.modules(), *twin.parameters())):
        raise AuditorError(
            f"copies of {type(module).__name__} share its modules or weights, so it cannot be moved to the GPU "
            f"without moving yours: {advice}",
            slug="no-copy",
        )
    return twin


def _environment(native: bool, seed: int) -> Environment:
    device = torch.cuda.get_device_name() if native else "cpu"
    return Environment(__version__, torch.__version__, device, "native" if native else "emulated", seed)


def _described_inputs(subject: Subject) -> tuple[str, ...]:
    leaves = [leaf for leaf in pytree.tree_leaves(subject.batches[0]) if isinstance(leaf, torch.Tensor)]
    return tuple(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in leaves)


def _unheld(subject: Subject) -> tuple[str, ...]:
    if subject.held_out:
        return ()
    return ("The plans were verified on the inputs they were made from: define get_eval_inputs() to use others.",)


def _weights(captured: Capture, found: Calibration) -> tuple[Weight, ...]:
    return tuple(
        Weight(p.fqn or p.name, p.kind, found.ranges[p.name])
        for p in captured.placeholders
        if p.kind in ("parameter", "buffer") and p.name in found.ranges
    )


def _rules_by_node(findings: Sequence[Finding]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for finding in findings:
        found[finding.node] = (*found.get(finding.node, ()), finding.rule)
    return found


def _report(
    captured: Capture,
    found: Calibration,
    judged: Judgement,
    by_node: Mapping[str, tuple[str, ...]],
    costs: Mapping[str, Cost],
    name: str,
) -> NodeReport:
    node = captured.nodes[name]
    tested = node.floating or any(error.disagreement is not None for error in found.errors.get(name, {}).values())
    return NodeReport(
        node=node,
        findings=by_node.get(name, ()),
        errors=found.errors.get(name, {}) if tested else {},
        contributions=found.contributions.get(name, {}) if tested else {},
        verdicts=judged.verdicts[name],
        exposed=judged.exposed[name],
        range=found.ranges.get(name),
        flops=costs[name].flops,
    )
