"""Lists the dtypes of weights and operations in a run (the ledger), and casts to fewer bits that nobody asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...capture.capture import record_path
from ...execution.beside import UnderPlan, policy_of, under_policy
from ...execution.casts import silent_casts
from ...execution.policy import Policy, PrecisionChoice, choice_from_scopes
from ...isolation import in_eval, isolate
from ...isolation.process import ieee
from ...loading.state import upcast_model
from ...numerics.formats import FORMATS
from ...numerics.nodes import row_of
from ...records import Capture, Node, Plan, Subject
from ...records.ledger import LedgerRow, SilentCast
from ..feature import Feature, Followed


def run_ledger(
    subject: Subject, plan: Plan | None, seed: int
) -> tuple[Capture, tuple[LedgerRow, ...], tuple[SilentCast, ...]]:
    """Record the model and replay it, under the plan if one is given. Returns the recording, the dtypes of weights and
    operations in the replay, and the casts that nobody asked for. Raises: CaptureError."""
    with ieee(), isolate(seed=seed), torch.inference_mode(False), in_eval(subject.model), upcast_model(subject):
        capture = record_path(subject, (plan.format,) if plan else (), seed).capture
        policy = policy_of(capture, plan) if plan else Policy.wide(capture)
        run = under_policy(capture, subject.model, subject.batches[0], policy)
        return capture, rows_of(subject, capture, plan, run), silent_casts(capture, subject)


def rows_of(subject: Subject, capture: Capture, plan: Plan | None, run: UnderPlan) -> tuple[LedgerRow, ...]:
    """A row for each parameter and buffer of the model, then for each recorded operation: its dtypes as loaded,
    requested, planned and executed. run: a replay, under the plan if a plan is given."""
    program = plan.program if plan is not None else None
    choice: PrecisionChoice | None = None
    kept = set[str | None]()  # operations that an exported program keeps in FP32
    stored: Mapping[str, str] = {}  # {placeholder of a weight: the format in which the plan stores it}
    if program is not None:
        kept = {each.node for each in program.kept if not each.only_output}
    elif plan is not None:
        choice = choice_from_scopes(plan.scopes)
        stored = policy_of(capture, plan).stored
    places = {place.fqn: place.name for place in capture.placeholders if place.fqn is not None}

    def weight(row: LedgerRow) -> LedgerRow:
        place = places.get(row.name, "")
        planned = None
        if choice is not None:
            planned = FORMATS[stored[place]].storage if place in stored else row.loaded
        return replace(row, planned=planned, executed=" and ".join(run.read.get(place, ())) or None)

    def planned_format(plan: Plan, name: str, owner: str) -> str:
        if choice is not None:
            return choice(owner)
        return "fp32" if name in kept else plan.format

    def operation_row(n: fx.Node) -> LedgerRow:
        node = capture.nodes[n.name]
        computed = run.dtypes.get(n.name)
        planned = None
        if plan is not None and node.floating:
            planned = FORMATS[planned_format(plan, n.name, node.owner)].storage
        return LedgerRow(
            name=n.name,
            kind="operation",
            loaded=node.dtype,
            author=node.dtype if row_of(n).cast else _dtype_of_region(node),
            planned=planned,
            executed=computed.computed if computed else None,
            module=node.owner,
            op=node.op,
            source=node.source,
        )

    nodes = (n for n in capture.graph_module.graph.nodes if n.name in capture.nodes and n.name not in capture.twins)
    return (*map(weight, subject.stored), *map(operation_row, nodes))


def _dtype_of_region(node: Node) -> str | None:
    """The dtype that the autocast region around an operation requests; None outside of regions."""
    if node.region is None:
        return None
    return node.region.dtype if node.region.enabled else "float32"


class Ledger(Feature):
    """Lists the dtypes of all weights and operations, under the recommended plan."""

    def fields(self, followed: Followed) -> dict[str, Any]:
        """The rows of the ledger."""
        planning = followed.planning
        rows = rows_of(planning.subject, planning.capture, followed.plan, followed.replay)
        return {"ledger": rows}


FEATURE = Ledger
