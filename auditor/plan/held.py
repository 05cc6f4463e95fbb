"""Choices that set shapes, such as which rows an expert gets: a recording holds them, and only the model's own runs show their cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..errors import let_through
from ..numerics.formats import runs
from ..records import Plan, ScopeChoice
from ..records.decisions import Decision, Decisions
from ..verify import Runs, in_hand
from .workbench import Workbench


def run_held_choices(bench: Workbench) -> Iterator[Decisions]:
    """By format, the model with everything low beside its recording, which takes FP32's choices; of the last strategy."""
    subject, options, batch = bench.subject, bench.options, bench.subject.batches[0]
    path, reference = bench.capture.first, bench.reference(batch)
    constants = {p.name for p in path.placeholders if p.kind == "constant" and p.name.startswith("held")}
    readers = (node for node in path.nodes.values() if constants & set(node.inputs))
    each = {(n.op, n.owner, n.source): Decision(n.name, n.op, n.owner, n.source, 0, None, None, None) for n in readers}
    for strategy in options.scope_strategies[-1:] if each else ():
        for fmt in filter(runs, options.formats):
            plan = Plan(f"{strategy}_{fmt}", strategy, fmt, {"": ScopeChoice(fmt)})
            plan = replace(plan, raised=subject.raised, stored_low=subject.stored_low)
            load = partial(in_hand, subject.model, {plan.name: plan})
            ran = Runs(load, [batch], options.where, options.seed, most=bench.most).answers(plan.name)
            try:
                error = math.inf if isinstance(ran, str) else bench.yardstick.distance(reference, ran.outputs[0])
                if math.isfinite(error):
                    yield Decisions(fmt, error, bench.replay([batch], bench.policy(plan)), tuple(each.values()))
            except Exception as failure:  # an operation refuses the format, or the outputs have other shapes
                let_through(failure)
