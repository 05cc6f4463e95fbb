"""The stages of an audit, one per line: from a Subject and Settings to an Audit."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from . import offload
from .artefact.strategies import GRAPHS
from .assembly import assemble
from .capture.capture import record_path
from .capture.several import record_paths
from .devices import CPU, follow, let_go
from .document.places import from_repository
from .errors import device_is_full
from .execution.beside import policy_of, under_plan, under_policy
from .execution.ledger import forward_casts, rows_of
from .execution.policy import Policy
from .generation.stage import GenerationReference, generate_reference
from .graphs import GraphPlans, graphs_of
from .graphs.pipelines import run_pipelines
from .isolation import isolate
from .isolation.process import flags, ieee
from .loading import in_eval
from .loading.placement import devices_of, place_subject
from .loading.state import upcast_model
from .measure.calibrate import calibrate_paths
from .measure.measure import working_set
from .measure.noise import noise_of
from .measure.rerun import of_verdicts
from .plan.plans import Planner
from .plan.quantized import QuantizedPlans
from .plan.recommend import recommend
from .plan.scores import InFp32, in_fp32
from .plan.units import in_unit, yardstick_of
from .plan.verified import mark_unsafe, run_held_choices, timed_plans, today_of
from .plan.workbench import Workbench
from .records import Audit, Capture, Finding, Plan, Subject
from .records.ledger import LedgerRow, SilentCast
from .records.quantization import QuantizedLayer, QuantizedPlan
from .rulebook.causes import FlowGraph, about, findings_of
from .rulebook.findings import silent_findings
from .rulebook.load import spread
from .rulebook.verdicts import judge, judge_layers, reports_of, with_backward
from .settings import Settings
from .stages import Stages, explain
from .training.recommend import recommend_plan
from .training.stage import MeasuredStep, conclude, prepare

TOO_SMALL = "The GPU's memory was too small, so the audit ran on the CPU, which emulates a GPU."


def run(subject: Subject, options: Settings) -> Audit:
    """Audit a subject; its model, and the process's global state, are restored.

    If `auto` selected a GPU with too little memory, the audit runs on the CPU instead, with a warning. Raises:
    AuditorError (its slug names the condition).
    """
    try:
        return _audit(subject, options)
    except Exception as error:
        full = options.native and device_is_full(error)
        if full:
            traceback.clear_frames(error.__traceback__)  # frees the frames' tensors on the device
        if not full or options.device != "auto":
            explain("load", error)  # errors of moving the model, which happens before the first stage
            raise
    gc.collect()
    let_go(options.where)
    audit = _audit(subject, options.with_values(device=CPU))
    return replace(audit, warnings=(*audit.warnings, TOO_SMALL))


def _audit(subject: Subject, options: Settings) -> Audit:
    stages, formats, seed, as_set = Stages(options.progress), options.formats, options.seed, subject.flags or flags()
    with ieee(), isolate(seed=seed), torch.inference_mode(False), in_eval(subject.model), upcast_model(subject):
        options = options.with_values(found=follow(options.device, devices_of(subject.model)))
        subject = place_subject(subject, options.where, options.seed)
        subject, options, generating = generate_reference(subject, options, stages)
        score = step = training = None
        if options.scoring is not None:
            with stages("FP32 score", options.scoring.name):
                score = in_fp32(subject, options, options.scoring)
        with stages("capture", subject.name):
            first = (recordings := record_paths(subject, formats, seed)).first.capture
            if (limit := offload.now()) is not None:
                limit.need(max(working_set(one.capture) for one in recordings.each))
        with stages("measure", f"{recordings.operations} nodes", recordings.operations):
            yardstick = yardstick_of(subject, options, first)
            captured, relative = calibrate_paths(recordings, subject, formats, seed, yardstick, options.schemes)
            noise = noise_of(first, subject, yardstick, seed, native=options.native)
        measured = in_unit(relative, yardstick.unit)
        judged = judge(captured, measured, formats, yardstick.budget, noise.found)
        if options.training:
            with stages("training", "the FP32 step"):
                step = prepare(subject, formats, seed)
            judged = with_backward(judged, captured, step.nodes, step.capture)
        with stages("classify", f"{len(options.rulebook)} rules"):
            graph = FlowGraph(captured.nodes, measured, judged.verdicts)
            layers = judge_layers(captured, measured, yardstick, noise.found)
            find = _finder(captured, options, _casts(subject, captured), layers)
            findings = find(graph, judged.exposed)
        bench = Workbench(subject, captured, measured, judged, findings, options, yardstick, noise, as_set)
        with bench.held:
            planned = _make_plans(bench, stages, score, generating, step)
        if (known := mark_unsafe(judged, planned.baselines)) is not judged:
            judged, graph = known, replace(graph, verdicts=known.verdicts)
            findings = find(graph, judged.exposed)
        recommended, reason = recommend(planned.plans, yardstick.budget, options.use)
        if step is not None:
            with stages("low steps", "FP16 and BF16 training steps"):
                training = conclude(step, planned.plans, recommended)
                budget = yardstick.budget
                recommended, reason = recommend_plan(training, planned.plans, recommended, reason, budget, options.use)
        with stages("follow", recommended or "FP32"):
            findings = about(findings, planned.plans, recommended, captured, graph)
            followed = under_plan(captured, subject.model, subject.batches[0], planned.plans.get(recommended or ""))
    flops = {name: cost.flops for name, cost in bench.costs.items()}
    return assemble(
        bench,
        nodes=reports_of(captured, measured, judged, findings, flops, followed.dtypes),
        findings=findings,
        quantization=layers,
        regions=of_verdicts(relative.regions, captured, judged.verdicts),
        planned=planned,
        evaluation=score.evaluation if score else None,
        generation=generating.record(planned.plans.get(recommended or "")) if generating else None,
        recommended=recommended,
        recommendation=reason,
        followed=followed,
        training=training,
        seconds=stages.seconds,
    )


def _quantized_plans(
    bench: Workbench, stages: Stages, score: InFp32 | None, generating: GenerationReference | None
) -> tuple[QuantizedPlan, ...]:
    """The plans of quantization schemes, compared with FP32's tokens if there are any."""
    with stages("schemes", "the fewest bits within the error budget"):
        making = QuantizedPlans.of(bench, score)
        plans = making.plans()
    if generating is not None:
        with stages("decode", "every plan of schemes"):
            plans = tuple(generating.quantized(plan, making.model) for plan in plans)
    return plans


def _make_plans(
    bench: Workbench,
    stages: Stages,
    score: InFp32 | None,
    generating: GenerationReference | None,
    step: MeasuredStep | None,
) -> GraphPlans:
    """Run the model all low, and make the plans with their scores; exported programs too if requested."""
    options = bench.options
    with stages("baseline", ", ".join(f"{name} without a plan" for name in options.scope_strategies)):
        planner = Planner(bench)
        baselines = planner.baselines()
        today, held = today_of(bench), tuple(run_held_choices(bench))
    with stages("plan", "solve, patch, verify"):
        plans = planner.plans(baselines)
    schemes = _quantized_plans(bench, stages, score, generating) if options.schemes else ()
    pipelines = tuple(run_pipelines(bench, step.first.by_parameter if step else None, stages))
    if score is not None:
        with stages("scores", score.scoring.name):
            plans = score.under(plans, bench)
    if generating is not None:
        with stages("decode", "every verified plan"):
            plans = generating.under(plans, bench)
    planned = GraphPlans(plans, baselines)
    if {*GRAPHS} & {*options.strategies}:
        with stages("graph", "export, solve, verify"):
            graphs = graphs_of(bench, score)
        planned = replace(graphs, plans={**plans, **graphs.plans}, baselines={**baselines, **graphs.baselines})
    if options.times:
        with stages("times", "FP32 and every plan, repeatedly"):
            timed, timing = timed_plans(bench, planned.plans)
        planned = replace(planned, plans=timed, timing=timing)
    return replace(planned, fp32_today=today, held=held, schemes=schemes, pipelines=pipelines)


def ledger(subject: Subject, options: Settings, plan: Plan | None) -> tuple[tuple[LedgerRow, ...], tuple[Finding, ...]]:
    """Return the dtypes of weights and operations in a run, under the plan if there is one, and findings on silent casts.

    Raises: CaptureError.
    """
    formats = (plan.format,) if plan else ()
    with ieee(), isolate(seed=options.seed), torch.inference_mode(False), in_eval(subject.model), upcast_model(subject):
        captured = record_path(subject, formats, options.seed).capture
        policy = policy_of(captured, plan) if plan else Policy.wide(captured)
        run = under_policy(captured, subject.model, subject.batches[0], policy)
        casts = _casts(subject, captured)
    rows = rows_of(subject, captured, plan, run)
    return rows, silent_findings(casts, captured, options.rulebook, options.formats)


def _casts(subject: Subject, captured: Capture) -> tuple[SilentCast, ...]:
    """Return the casts that nobody asked for, on loading and in the forward; files relative to their repository."""
    casts = (*subject.casts, *forward_casts(captured, subject))
    return tuple(replace(one, file=from_repository(Path(one.file))) if one.file else one for one in casts)


def _finder(
    captured: Capture, options: Settings, casts: tuple[SilentCast, ...], layers: tuple[QuantizedLayer, ...]
) -> Callable[..., tuple[Finding, ...]]:
    """Return a function that returns the selected findings of the recorded operations."""
    return partial(
        findings_of,
        captured,
        rules=spread(options.rulebook, options.formats, options.schemes),
        formats=options.formats,
        trains=options.training,
        select=options.select,
        ignores=options.ignores,
        casts=casts,
        layers=layers,
    )
