"""The stages of an audit, one per line: from a Subject and Settings to an Audit."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import __version__, offload
from .artefact.strategies import plan_title
from .capture.several import record_paths
from .criteria.budget import budget_of
from .criteria.defaults import propose
from .criteria.measure import words_of
from .document.live import fields_of
from .errors import device_is_full
from .execution.beside import under_plan
from .execution.casts import silent_casts
from .features.feature import Evidence, Feature, Followed, wanted
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
from .measure.rerun import OutputMetric, of_verdicts
from .numerics.devices import CPU, follow, free_device_memory, is_gpu, libraries, name_of, on_target
from .plan.all_low import AllLow, run_all_low
from .plan.context import FreshProcess, MeasuredModel, PlanningContext, Scorer, in_unit
from .plan.made import MadePlans
from .plan.plans import Planner
from .plan.recommend import recommend
from .plan.repairs import predict_repairs
from .plan.verified import note_gpu_only, today_of
from .records import Audit, Environment, Finding, Plan, Subject, Weight
from .records.audit import Proposal, Provenance
from .report.view import warnings_of
from .rulebook.causes import FlowGraph, about, findings_of, input_names
from .rulebook.compiled import unrounded_if_trained
from .rulebook.inputs import input_magnitudes
from .rulebook.load import spread
from .rulebook.verdicts import Judgement, judge, judge_layers, reports_of
from .settings import BOTH, Settings
from .stages import Stages, explain


def run(subject: Subject, options: Settings) -> Audit:
    """Audit a subject; its model, and the process's global state, are restored.

    If the audit is for both targets, another audit, for CUDA, is made first, with whose plans this one compares its own.
    If `auto` selected a GPU with too little memory, the audit runs on the CPU instead, with a warning. Raises:
    AuditorError (its slug names the condition).
    """
    if options.on == BOTH:
        left_out = {"measure_time": False, "generate": None, "evaluate": None, "scoring": None}
        for_cuda = run(subject, options.model_copy(update={"on": "cuda", **left_out}))
        options = options.model_copy(update={"on": CPU, "for_cuda": for_cuda.plans})
    try:
        with on_target(options.where):
            return _audit(subject, options)
    except Exception as error:
        full = is_gpu(options.where) and device_is_full(error)
        if full:
            traceback.clear_frames(error.__traceback__)  # frees the frames' tensors on the device
        if not full or options.device != "auto":
            explain("load", error)  # the model is moved to the device before the first stage
            raise
    gc.collect()
    free_device_memory(options.where)
    audit = _audit(subject, options.model_copy(update={"device": CPU}))
    small = "The GPU's memory was too small, so the audit ran on the CPU, which emulates a GPU."
    return replace(audit, warnings=(*audit.warnings, small))


@dataclass(frozen=True)
class Case:
    """What every stage of one audit shares.

    flags: the caller's torch settings for FP32. features: those that the audit asks for, with the results of their runs.
    """

    subject: Subject
    options: Settings
    stages: Stages
    flags: Flags
    process: FreshProcess
    features: Sequence[Feature]

    @property
    def scorer(self) -> Scorer | None:
        """The scorer that accepts or refuses plans in addition to the error budget; None if no feature of the audit
        has one."""
        return next((each.scorer for each in self.features if each.scorer is not None), None)


def _audit(subject: Subject, options: Settings) -> Audit:
    with _prepared(subject, options) as case:
        model = _measure(case)
        all_low = _run_all_low(case, model)
        evidence = _gather_evidence(case, model)
        judged = _judge(model, all_low, evidence)
        findings = _apply_rules(case, model, judged, all_low, evidence)
        planning = PlanningContext.of(model, judged, findings, case.scorer)
        planned = _make_plans(case, planning, all_low)
        recommended, reason = _recommend(case, planning, planned)
        return _conclude(case, planning, planned, recommended, reason)


@contextmanager
def _prepared(subject: Subject, options: Settings) -> Iterator[Case]:
    """Yield the Case of an audit: the model on its device, in evaluation mode and in FP32, and its FP32 results.

    The model and the process's global state are restored at the end.
    """
    flags_as_set = subject.flags or flags()
    with (
        ieee(),
        isolate(seed=options.seed),
        torch.inference_mode(False),
        in_eval(subject.model),
        upcast_model(subject),
        FreshProcess() as process,
    ):
        stages = Stages(options.progress)
        if options.on != CPU:
            device = follow(options.device, devices_of(subject.model))
            options = options.model_copy(update={"resolved_device": device})
        subject = place_subject(subject, options.where, options.seed)
        running = wanted(options)
        for feature in running:
            subject, options = feature.prepare(subject, options, stages)
        yield Case(subject, options, stages, flags_as_set, process, running)


def _measure(case: Case) -> MeasuredModel:
    """Record the model, and measure every operation in every format."""
    subject, options, seed = case.subject, case.options, case.options.seed
    with case.stages("capture", subject.name):
        recordings = record_paths(subject, options.formats, seed)
        limit = offload.now()
        if limit is not None:
            limit.need(max(working_set(path.capture) for path in recordings.each))
    with case.stages("measure", "run each operation in low precision", recordings.operations):
        first = recordings.first
        budget = budget_of(subject, first.capture, options.max_error, options.metric, options.criteria, seed)
        output_metric = OutputMetric(*budget)
        captured, measured = calibrate_paths(recordings, subject, options.formats, seed, output_metric, options.schemes)
        noise = noise_of(first, subject, output_metric, seed, native=options.native)
    effects = in_unit(measured, output_metric.unit)
    return MeasuredModel(subject, captured, effects, options, output_metric, noise, case.flags, case.process)


def _run_all_low(case: Case, model: MeasuredModel) -> AllLow:
    strategies = " and by ".join(case.options.scope_strategies)
    with case.stages("baseline", f"everything in low precision, by {strategies}"):
        return run_all_low(model)


def _gather_evidence(case: Case, model: MeasuredModel) -> Evidence:
    """What the features measure before operations are judged."""
    evidence = Evidence()
    for feature in case.features:
        evidence = feature.before_verdicts(evidence, model, case.stages)
    return evidence


def _judge(model: MeasuredModel, all_low: AllLow, evidence: Evidence) -> Judgement:
    """The verdicts on all operations and layers, from all evidence."""
    noise = model.noise.measured
    judged = judge(
        model.capture,
        model.measured,
        model.options.formats,
        model.output_metric.budget,
        noise,
        all_low=all_low.runs,
        backward=evidence.unsafe,
    )
    layers = judge_layers(model.capture, model.measured, model.output_metric, noise)
    return replace(judged, layers=layers)


def _apply_rules(
    case: Case, model: MeasuredModel, judged: Judgement, all_low: AllLow, evidence: Evidence
) -> tuple[Finding, ...]:
    """The findings of all rules, with their causes, before their severity under a plan is known."""
    options = case.options
    with case.stages("classify", f"{len(options.rulebook)} rules"):
        gradients = evidence.changed_by_compiler
        if gradients is None:
            first_format = options.formats[0]
            ranges = model.measured.ranges
            gradients = unrounded_if_trained(model.capture, case.subject, ranges, first_format, options.seed)
        return findings_of(
            model.capture,
            model.measured,
            judged,
            rules=spread(options.rulebook, options.formats, options.schemes),
            formats=options.formats,
            trains=options.training,
            select=options.select,
            ignores=options.ignores,
            casts=silent_casts(model.capture, case.subject),
            inputs=input_magnitudes(model.capture, case.subject),
            failed=all_low.failed,
            gradients=gradients,
        )


def _make_plans(case: Case, planning: PlanningContext, all_low: AllLow) -> MadePlans:
    """Make and verify the plans of modules, and all that features add to plans."""
    with case.stages("plan", "solve, patch, verify"):
        today = today_of(planning)
        plans = note_gpu_only(planning, Planner(planning, all_low.runs).plans())
    made = MadePlans(plans, all_low.runs, fp32_today=today, decisions=all_low.decisions)
    for feature in case.features:
        made = feature.after_plans(made, planning, case.stages)
    return made


def _recommend(case: Case, planning: PlanningContext, planned: MadePlans) -> tuple[str | None, str]:
    """The name of the plan to use, None for FP32, and the reason; a feature may choose."""
    for feature in case.features:
        choice = feature.recommend(planned, planning)
        if choice is not None:
            return choice
    budget = planning.output_metric.budget
    return recommend(planned.plans, budget, case.options.use, baselines=planned.baselines)


def _conclude(
    case: Case,
    planning: PlanningContext,
    planned: MadePlans,
    recommended: str | None,
    reason: str,
) -> Audit:
    """Rate the findings for the recommended plan, predict repairs, and join all results in an Audit."""
    subject = planning.subject
    captured = planning.capture
    judged = planning.judged
    measured = planning.measured
    plan = planned.plans.get(recommended or "")
    with case.stages("follow", f"record the dtypes under {recommended or 'FP32'}"):
        graph = FlowGraph(captured.nodes, measured, judged.verdicts, input_names(captured), judged.exposed)
        strategies = planning.options.strategies
        findings = about(planning.findings, planned.plans, recommended, captured, graph, strategies)
        repairs = predict_repairs(planning, planned.plans, recommended, findings)
        replay = under_plan(captured, subject.model, subject.batches[0], plan)
    of_features = _fields_of_features(case.features, Followed(planning, plan, replay, case.stages))
    proposals = _propose_criteria(planning, planned, plan)

    # Twins are operations of a second path that are recorded under their name in the first.
    twins = captured.twins
    flops = {name: cost.flops for name, cost in planning.costs.items()}
    own_findings = [replace(finding, node=twins.get(finding.node, finding.node)) for finding in findings]
    own_errors = {name: error for name, error in replay.errors.items() if name not in twins}
    warnings = (*subject.warnings, *captured.warnings, *planned.warnings, *warnings_of(planning))
    return Audit(
        **_description(planning, case.stages.seconds),
        nodes=reports_of(captured, measured, judged, findings, flops, replay.dtypes),
        findings=tuple(own_findings),
        quantization=judged.layers,
        regions=of_verdicts(measured.regions, captured, judged.verdicts),
        plans=planned.plans,
        baselines=planned.baselines,
        programs=planned.programs,
        fp32_today=planned.fp32_today,
        timing=planned.timing,
        quantized_plans=planned.quantized_plans,
        decisions=(*measured.decisions, *planned.decisions),
        repairs=repairs,
        recommended=recommended,
        recommendation=reason,
        proposals=proposals,
        plan_errors=own_errors,
        warnings=warnings,
        **of_features,
    )


def _fields_of_features(features: Iterable[Feature], followed: Followed) -> dict[str, Any]:
    """The fields of Audit that features fill, from the replay under the recommended plan."""
    fields = dict[str, Any]()
    for feature in features:
        fields |= feature.fields(followed)
    return fields


def _propose_criteria(planning: PlanningContext, planned: MadePlans, plan: Plan | None) -> tuple[Proposal, ...]:
    """Criteria for outputs without one, by how the recommended plan changes them, or by all verified plans without
    one."""
    tried = [plan] if plan else [other for other in planned.plans.values() if other.is_verified]
    runs = [(plan_title(other), other.verification) for other in tried if other.verification]
    options = planning.options
    outputs = planning.reference(planning.subject.batches[0])
    distance = planning.output_metric.distance
    proposals = propose(distance, options.criteria, outputs, planning.capture.first, runs, options.max_error)
    return tuple(proposals)


def _description(planning: PlanningContext, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The fields of Audit that no plan changes: model, inputs, options, environment and measurements. seconds: by stage."""
    subject, captured, options, measured = planning.subject, planning.capture, planning.options, planning.measured
    distance = planning.output_metric.distance
    costs = flag_costs(
        captured, measured.errors, measured.contributions, measured.under_flags, planning.output_metric.budget
    )
    given = (p for p in captured.placeholders if p.kind == "input" and p.name not in captured.twins)
    stored = (p for p in captured.placeholders if p.kind in ("parameter", "buffer") and p.name in measured.ranges)
    return {
        "subject": Provenance.of(subject),
        "live": subject.given or subject,  # not a copy on a GPU, which would occupy memory
        **fields_of(subject.model, {node.owner for node in captured.nodes.values()}),
        "inputs": shapes_of(subject.batches[0]),
        "formats": options.formats,
        "max_error": planning.output_metric.budget,
        "metric": words_of(distance),
        "criteria": planning.output_metric.criteria,
        "use": options.use,
        "command": options.command,
        "environment": Environment(
            auditor=__version__,
            torch=torch.__version__,
            device=name_of(options.where),
            execution="native" if options.native else "emulated",
            seed=options.seed,
            libraries=libraries(options.where),
            flags=planning.flags,
            seconds={stage: round(spent, 2) for stage, spent in seconds.items()},
            memory=offload.within(),
            peak_memory=offload.came_to(),
        ),
        "capture_method": captured.method,
        "graph_inputs": tuple(p.name for p in given),
        "input_ranges": input_ranges(subject.model, subject.batches),
        "graph_outputs": captured.first.outputs,
        "weights": tuple(Weight(p.fqn or p.name, p.kind, measured.ranges[p.name]) for p in stored),
        "linearity": tuple(measured.linearity[fmt] for fmt in options.formats if fmt in measured.linearity),
        "flags": costs,
        "noise": planning.noise.measured,
    }
