"""The stages of an audit, one per line: from a Subject and Settings to an Audit."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import __version__, offload
from .artefact.strategies import GRAPHS, plan_title
from .capture.places import portable
from .capture.several import record_paths
from .criteria.budget import budget_of
from .criteria.defaults import propose
from .criteria.measure import Criteria, words_of
from .document.live import fields_of
from .errors import device_is_full
from .execution.beside import under_plan
from .execution.ledger import rows_of, silent_casts
from .execution.repeats import repeated_errors
from .generation.stage import GenerationReference, generate_reference
from .graphs.pipelines import run_pipelines
from .graphs.stage import GraphPlans, graphs_of
from .isolation import in_eval, isolate
from .isolation.process import Flags, flags, ieee
from .loading.inputs import shapes_of
from .loading.placement import devices_of, place_subject
from .loading.state import upcast_model
from .measure.calibrate import calibrate_paths
from .measure.inputs import input_ranges
from .measure.measure import working_set
from .measure.noise import noise_of
from .measure.products import flag_costs
from .measure.rerun import Yardstick, of_verdicts
from .numerics.devices import CPU, follow, let_go, libraries, name_of
from .plan.plans import Planner
from .plan.quantized import QuantizedPlans
from .plan.recommend import recommend
from .plan.repairs import predict_repairs
from .plan.scores import InFp32, in_fp32
from .plan.verified import failed_runs, mark_unsafe, note_gpu_only, run_held_choices, timed_plans, today_of
from .plan.workbench import Workbench, in_unit
from .records import Audit, Environment, Finding, Subject, Weight
from .records.audit import Provenance
from .records.quantization import QuantizedPlan
from .report.view import warnings_of
from .report.words import label
from .rulebook.causes import FlowGraph, about, findings_of, input_names
from .rulebook.inputs import input_magnitudes
from .rulebook.load import spread
from .rulebook.verdicts import judge, judge_layers, reports_of, with_backward
from .settings import Settings
from .stages import Stages, explain
from .training.recommend import recommend_plan
from .training.stage import MeasuredStep, conclude, prepare


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
            explain("load", error)  # the model is moved to the device before the first stage
            raise
    gc.collect()
    let_go(options.where)
    audit = _audit(subject, options.model_copy(update={"device": CPU}))
    small = "The GPU's memory was too small, so the audit ran on the CPU, which emulates a GPU."
    return replace(audit, warnings=(*audit.warnings, small))


def _audit(subject: Subject, options: Settings) -> Audit:
    stages, as_set, score, training = Stages(options.progress), subject.flags or flags(), None, None
    with ieee(), isolate(seed=options.seed), torch.inference_mode(False), in_eval(subject.model), upcast_model(subject):
        options = options.model_copy(update={"found": follow(options.device, devices_of(subject.model))})
        placed = place_subject(subject, options.where, options.seed)
        subject, options, generating = generate_reference(placed, options, stages)
        if options.scoring is not None:
            with stages("FP32 score", options.scoring.name):
                score = in_fp32(subject, options, options.scoring)
        bench, step, find = _measure(subject, options, stages, as_set)
        captured, judged, findings, budget = bench.capture, bench.judged, bench.findings, bench.yardstick.budget
        with bench.held:
            planned = _make_plans(bench, stages, score, generating, step)
        known, failed = mark_unsafe(judged, planned.baselines), failed_runs(planned.baselines)
        if known is not judged or failed:
            judged, findings = known, find(known, failed=failed)
        recommended, reason = recommend(planned.plans, budget, options.use, baselines=planned.baselines)
        if step is not None:
            with stages("low-precision steps", f"run the training step in {' and '.join(map(label, options.formats))}"):
                training = conclude(step, planned.plans, recommended)
                recommended, reason = recommend_plan(training, planned.plans, recommended, reason, budget, options.use)
        plan = planned.plans.get(recommended or "")
        with stages("follow", f"record the dtypes under {recommended or 'FP32'}"):
            graph = FlowGraph(captured.nodes, bench.measured, judged.verdicts, input_names(captured), judged.exposed)
            findings = about(findings, planned.plans, recommended, captured, graph, options.strategies)
            repairs = predict_repairs(bench, planned.plans, recommended, findings)
            followed = under_plan(captured, subject.model, subject.batches[0], plan)
    flops = {name: cost.flops for name, cost in bench.costs.items()}
    tried = [plan] if plan else [one for one in planned.plans.values() if one.is_verified]
    runs = [(plan_title(one), one.verification) for one in tried if one.verification]
    outputs, distance = bench.reference(subject.batches[0]), bench.yardstick.distance
    return Audit(
        **_description(bench, stages.seconds),
        nodes=reports_of(captured, bench.measured, judged, findings, flops, followed.dtypes),
        findings=tuple(replace(one, node=captured.twins.get(one.node, one.node)) for one in findings),
        quantization=judged.layers,
        regions=of_verdicts(bench.measured.regions, captured, judged.verdicts),
        **{name: value for name, value in vars(planned).items() if name not in ("said", "held")},
        decisions=(*bench.measured.decisions, *planned.held),
        repairs=repairs,
        evaluation=replace(score.evaluation, function=portable(score.evaluation.function)) if score else None,
        generation=generating.record(plan) if generating else None,
        training=training,
        recommended=recommended,
        recommendation=reason,
        proposals=tuple(propose(distance, options.criteria, outputs, captured.first, runs, options.max_error)),
        ledger=rows_of(subject, captured, plan, followed),
        plan_errors={name: error for name, error in followed.errors.items() if name not in captured.twins},
        repeats=repeated_errors(captured, subject, plan, followed.errors),
        warnings=(*subject.warnings, *captured.warnings, *planned.said, *warnings_of(bench, training)),
    )


def _measure(
    subject: Subject, options: Settings, stages: Stages, as_set: Flags
) -> tuple[Workbench, MeasuredStep | None, Callable[..., tuple[Finding, ...]]]:
    """Record the model, measure and judge every operation. Returns the inputs of planning, the FP32 training step if
    training is audited, and a function that returns the findings of a Judgement and of `failed` runs, see `findings_of`."""
    formats, seed, step = options.formats, options.seed, None
    with stages("capture", subject.name):
        first = (recordings := record_paths(subject, formats, seed)).first.capture
        if (limit := offload.now()) is not None:
            limit.need(max(working_set(one.capture) for one in recordings.each))
    with stages("measure", "run each operation in low precision", recordings.operations):
        yardstick = Yardstick(*budget_of(subject, first, options.max_error, options.metric, options.criteria, seed))
        captured, measured = calibrate_paths(recordings, subject, formats, seed, yardstick, options.schemes)
        noise = noise_of(recordings.first, subject, yardstick, seed, native=options.native)
    measured = in_unit(measured, yardstick.unit)
    layers = judge_layers(captured, measured, yardstick, noise.found)
    judged = replace(judge(captured, measured, formats, yardstick.budget, noise.found), layers=layers)
    if options.training:
        with stages("training", "run the training step in FP32"):
            step = prepare(subject, formats, seed)
        judged = with_backward(judged, captured, step.nodes, step.capture)
    with stages("classify", f"{len(options.rulebook)} rules"):
        rules, casts = spread(options.rulebook, formats, options.schemes), silent_casts(captured, subject)
        wanted = partial(findings_of, select=options.select, ignores=options.ignores, trains=options.training)
        inputs = input_magnitudes(captured, subject)
        find = partial(wanted, captured, measured, rules=rules, formats=formats, casts=casts, inputs=inputs)
        findings = find(judged)
    return Workbench(subject, captured, measured, judged, findings, options, yardstick, noise, as_set), step, find


def _make_plans(
    bench: Workbench,
    stages: Stages,
    score: InFp32 | None,
    generating: GenerationReference | None,
    step: MeasuredStep | None,
) -> GraphPlans:
    """Run the whole model in low precision, and make the plans with their scores; exported programs too if requested."""
    options, graphs, timing = bench.options, GraphPlans(), None
    schemes: tuple[QuantizedPlan, ...] = ()
    with stages("baseline", f"everything in low precision, by {' and by '.join(options.scope_strategies)}"):
        planner = Planner(bench)
        baselines = planner.baselines()
        today, held = today_of(bench), tuple(run_held_choices(bench))
    with stages("plan", "solve, patch, verify"):
        plans = note_gpu_only(bench, planner.plans())
    if options.schemes:
        with stages("schemes", "find the fewest bits per weight within the error budget"):
            making = QuantizedPlans(bench, score)
            schemes = making.plans()
    pipelines = tuple(run_pipelines(bench, step.first.by_parameter if step else None, stages))
    if score is not None:
        with stages("scores", score.scoring.name):
            plans = score.under(plans, bench)
    if generating is not None:
        with stages("decode", "generate tokens under every verified plan"):
            schemes = tuple(generating.under_scheme(plan, making.model) for plan in schemes)
            plans = generating.under(plans, bench)
    if {*GRAPHS} & {*options.strategies}:
        with stages("graph", "export, solve, verify"):
            graphs = graphs_of(bench, score)
    plans, baselines = {**plans, **graphs.plans}, {**baselines, **graphs.baselines}
    if options.times:
        with stages("times", "FP32 and every plan, repeatedly"):
            plans, timing = timed_plans(bench, plans)
    return GraphPlans(plans, baselines, graphs.programs, graphs.said, today, held, timing, schemes, pipelines)


def _description(bench: Workbench, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The fields of Audit that no plan changes: model, inputs, options, environment and measurements. seconds: by stage."""
    subject, captured, options, measured = bench.subject, bench.capture, bench.options, bench.measured
    distance = bench.yardstick.distance
    costs = flag_costs(captured, measured.errors, measured.contributions, measured.under_flags, bench.yardstick.budget)
    given = (p for p in captured.placeholders if p.kind == "input" and p.name not in captured.twins)
    stored = (p for p in captured.placeholders if p.kind in ("parameter", "buffer") and p.name in measured.ranges)
    return {
        "subject": Provenance.of(subject),
        "live": subject.given or subject,  # not a copy on a GPU, which would occupy memory
        **fields_of(subject.model, {node.owner for node in captured.nodes.values()}),
        "inputs": shapes_of(subject.batches[0]),
        "formats": options.formats,
        "max_error": bench.yardstick.budget,
        "metric": words_of(distance),
        "criteria": tuple(map(str, distance.all())) if isinstance(distance, Criteria) else (),
        "use": options.use,
        "command": options.command,
        "environment": Environment(
            auditor=__version__,
            torch=torch.__version__,
            device=name_of(options.where),
            execution="native" if options.native else "emulated",
            seed=options.seed,
            libraries=libraries(options.where),
            flags=bench.flags,
            seconds={stage: round(spent, 2) for stage, spent in seconds.items()},
            memory=offload.within(),
            held=offload.came_to(),
        ),
        "capture_method": captured.method,
        "graph_inputs": tuple(p.name for p in given),
        "input_ranges": input_ranges(subject.model, subject.batches),
        "graph_outputs": captured.first.outputs,
        "weights": tuple(Weight(p.fqn or p.name, p.kind, measured.ranges[p.name]) for p in stored),
        "linearity": tuple(measured.linearity[fmt] for fmt in options.formats if fmt in measured.linearity),
        "flags": costs,
        "noise": bench.noise.found,
    }
