"""Combines the results of all stages in one Audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from . import __version__
from .artefact.strategies import plan_title
from .criteria.criterion import FLOOR
from .criteria.defaults import by_itself, describe_defaults, suggest_criteria
from .criteria.measure import Criteria, names_of
from .devices import libraries, name_of
from .document.codec import under_several_names
from .document.places import portable
from .execution.beside import UnderPlan
from .execution.ledger import rows_of
from .graphs import GraphPlans
from .isolation.members import named_modules, named_parameters, size_of, structure_of
from .loading.inputs import shapes_of
from .measure.causes import storage_notes
from .measure.flags import flag_costs
from .offload import came_to, within
from .paths import enclosing_paths
from .plan.workbench import Workbench
from .records import Audit, Environment, Evaluation, Plan, Proposal, Weight
from .records.audit import Provenance
from .records.training import Training
from .report.words import op, scope, shorten

STEADY = 0.1
"""Share of the error budget up to which differences between FP32 runs need no warning."""

NAMED = 4
"""Number of non-deterministic operations that a warning names; the report has all."""


def assemble(
    bench: Workbench,
    *,
    followed: UnderPlan,
    evaluation: Evaluation | None,
    seconds: Mapping[str, float],
    planned: GraphPlans,
    **found: Any,
) -> Audit:
    """The Audit. followed: the run under the recommended plan. planned: all plans. found: more fields."""
    subject, captured, options, measured = bench.subject, bench.capture, bench.options, bench.measured
    plans, twins = planned.plans, captured.twins
    owners = {node.owner for node in captured.nodes.values()}
    around = {path for owner in owners for path in enclosing_paths(owner)} - owners  # modules that only contain others
    found["findings"] = tuple(replace(f, node=twins.get(f.node, f.node)) for f in found["findings"])
    return Audit(
        subject=Provenance.of(subject),
        live=subject.given or subject,  # not a copy on a GPU, which would occupy memory
        parameters=size_of(subject.model),
        structure=structure_of(subject.model),
        inputs=shapes_of(subject.batches[0]),
        graph_inputs=tuple(p.name for p in captured.placeholders if p.kind == "input" and p.name not in twins),
        graph_outputs=captured.first.outputs,
        classes={path: type(module).__name__ for path, module in named_modules(subject.model) if path in around},
        tied_parameters=under_several_names(named_parameters(subject.model)),
        shared_modules=under_several_names(named_modules(subject.model)),
        environment=_environment(bench, seconds),
        formats=options.formats,
        max_error=bench.yardstick.budget,
        flags=flag_costs(
            captured, measured.errors, measured.contributions, measured.under_flags, bench.yardstick.budget
        ),
        use=options.use,
        capture_method=captured.method,
        plan_errors={name: error for name, error in followed.errors.items() if name not in twins},
        warnings=(*subject.warnings, *captured.warnings, *planned.said, *_warnings(bench, found["training"])),
        command=options.command,
        noise=bench.noise.found,
        quantized_plans=planned.schemes,
        pipelines=planned.pipelines,
        evaluation=evaluation and replace(evaluation, function=portable(evaluation.function)),
        weights=tuple(
            Weight(p.fqn or p.name, p.kind, measured.ranges[p.name])
            for p in captured.placeholders
            if p.kind in ("parameter", "buffer") and p.name in measured.ranges
        ),
        decisions=(*bench.measured.decisions, *planned.held),
        ledger=rows_of(subject, captured, plans.get(found["recommended"] or ""), followed),
        linearity=tuple(one for fmt in options.formats if (one := bench.measured.linearity.get(fmt))),
        baselines=planned.baselines,
        plans=plans,
        programs=planned.files,
        fp32_today=planned.fp32_today,
        timing=planned.timing,
        **_held_to(bench, plans, found["recommended"]),
        **found,
    )


def _held_to(bench: Workbench, plans: Mapping[str, Plan], recommended: str | None) -> dict[str, Any]:
    """The error measure, the criteria, and suggested criteria (no suggestions with the user's own metric)."""
    options = bench.options
    name = getattr(options.metric, "__name__", "custom metric") if options.metric else "relative L2 of the outputs"
    criteria = bench.yardstick.distance if isinstance(bench.yardstick.distance, Criteria) else None
    set_ = criteria.each if criteria else ()
    proposals: list[Proposal] = []
    if options.metric is None:
        proposals += describe_defaults(set(set_) - set(options.limits))
        for plan in [plans[recommended]] if recommended else [plan for plan in plans.values() if plan.is_verified]:
            ran = plan.verification
            if ran is not None and ran.apart:
                joint = ran.joint if ran.joint is not None else ran.measured_error
                proposals += by_itself(set_, plan_title(plan), ran.apart, joint or 0.0, options.max_error)
                break
        names = names_of(bench.reference(bench.subject.batches[0]))
        proposals += suggest_criteria(set_, names, bench.capture.first)
    return {
        "metric": "largest value of a criterion, as a share of its limit" if criteria else name,
        "criteria": tuple(map(str, criteria.all())) if criteria else (),
        "proposals": tuple(proposals),
    }


def _environment(bench: Workbench, seconds: Mapping[str, float]) -> Environment:
    options = bench.options
    return Environment(
        auditor=__version__,
        torch=torch.__version__,
        device=name_of(options.where),
        execution="native" if options.native else "emulated",
        seed=options.seed,
        libraries=libraries(options.where),
        flags=bench.flags,
        seconds={stage: round(spent, 2) for stage, spent in seconds.items()},
        memory=within(),
        held=came_to(),
    )


def _warnings(bench: Workbench, training: Training | None) -> Iterator[str]:
    """Warnings about stored weights, noise, held-out inputs, training batches, and the verification."""
    subject, noise = bench.subject, bench.noise.found
    yield from storage_notes(subject, bench.capture, bench.measured.ranges, bench.options.formats)
    if noise.error > STEADY * bench.yardstick.budget:
        nodes = [bench.capture.nodes[name] for name in noise.operations]
        listed = list(dict.fromkeys(f"{op(node.op)} in {scope(node.owner)}" for node in nodes))
        named = ", ".join(shorten(listed, NAMED, "measurements.json"))
        begins = f"The first operations that gave different results for equal inputs: {named}. "
        keeps = (
            "The model keeps state that the audit cannot restore (in a generator, in C++, in another process), or computes "
            "in a varying order. "
        )
        allowed = f"Errors up to {FLOOR:g} times this difference ({noise.floor:.2g}) are ignored."
        yield (
            "The model is not reproducible: FP32 runs from the same state and random numbers differ by "
            f"{noise.error:.2g}. {begins if nodes else keeps}"
            f"{allowed if noise.floor else 'No plan can have a smaller error.'}"
        )
    if not subject.held_out:
        yield "The plans were verified on the calibration inputs: define get_eval_inputs() for held-out inputs."
    if training is not None and training.batches != len(subject.batches):
        yield (
            f"Gradients were measured on {training.batches} of {len(subject.batches)} batches: "
            "the other batches have other shapes or operations in the training step."
        )
    for reason in bench.not_fresh[:1]:
        yield (
            f"The plans were verified in the audit's own process: {reason}. A fresh process imported patched_model.py and built "
            "the model, and did not run its plans."
        )
