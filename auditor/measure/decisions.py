"""Decisions inside the model, such as a top-k: how many flip in low precision, and how much of the output error they
cause."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..capture.paths import reach
from ..criteria.criterion import Criterion
from ..criteria.margins import find_margins
from ..criteria.values import value
from ..errors import let_through
from ..execution.execute import Executor, Replay, SubsetLowPrecision, ValueOf
from ..numerics.casting import widen
from ..numerics.entries import is_number
from ..numerics.metrics import disagreement
from ..numerics.nodes import arguments_with_defaults, row_of, tensors_in
from ..records import Capture
from ..records.decisions import Decision, Decisions
from ..records.paths import within
from ..stages import beat
from .alone import rounder
from .measure import Measurement
from .rerun import OutputMetric, chooses_otherwise

MOST = 8
"""Maximum number of operations whose flips get a separate run, most own flips first; each run costs a forward pass."""

LEVELS = 8
"""The product that computes a decision's scores is searched at most this many operations upstream of the decision."""

ABOVE = Criterion("", "flips", 0.0, (("threshold", 0.0),))


def measure_decisions(measurement: Measurement, output_metric: OutputMetric) -> tuple[Decisions, ...]:
    """For each format, the decisions that flip and the error they cause; () for a model without decisions that change.

    An operation's error comes from a run in which only its decisions may flip: flips elsewhere would hide the error.
    """
    nodes = find_deciding(measurement.capture)
    runs = [_LowRuns(measurement, fmt, output_metric, nodes) for fmt in measurement.formats if nodes]
    return tuple(one for one in map(_take_apart, runs) if one is not None)


def _take_apart(runs: _LowRuns) -> Decisions | None:
    """Separate the flips of a run in low precision by operation; None if none flips or is expected to, or if the
    outputs are not finite."""
    error, free, changed = runs.run((), runs.nodes)
    frozen_error = error  # the error without flips
    frozen = free  # the decisions of a run in which none may flip: their own flips
    if changed:
        frozen_error, frozen, _ = runs.run(runs.nodes, runs.nodes)
    names = [name for name in free if name in changed or (name in frozen and frozen[name].predicted)]
    if not names or not math.isfinite(error):
        return None
    # no low-precision value reaches an operation that is missing in `frozen`
    unreached = replace(free[names[0]], seen=0.0, predicted=0.0, own=0.0)
    own = {name: frozen.get(name, unreached) for name in names}

    def own_flips(name: str) -> float:
        """The share of the operation's decisions that flip although all other operations take FP32's decisions; if
        that run did not count it, the share that flips in the run where all may flip."""
        decision = free[name] if own[name].own is None else own[name]
        return decision.seen or 0.0

    ranked = sorted(names, key=lambda name: -own_flips(name))
    flipping = [name for name in ranked if name in changed][:MOST]
    costs = _errors_by_flips(runs, flipping, error)
    operations = list[Decision]()
    for name in names:
        alone = own[name]
        operations.append(replace(free[name], predicted=alone.predicted, own=alone.own, error=costs.get(name)))
    operations.sort(key=lambda decision: (-(decision.error or 0.0), -(decision.seen or 0.0)))
    result = Decisions(runs.format, error, frozen_error, tuple(operations))
    if not result.share:
        return result
    first = operations[0]
    module, scorer = runs.find_scorer(first.node)
    lifted_error, flips, _ = runs.run((), {first.node}, scorer)
    seen = flips.get(first.node, unreached).seen or 0.0
    return replace(result, lifted=module, lifted_seen=seen, lifted_error=lifted_error)


def _errors_by_flips(runs: _LowRuns, flipping: Sequence[str], error: float) -> dict[str, float]:
    """{operation: the error if only its decisions may flip}. error: if all may flip."""
    if len(flipping) == 1:
        return {flipping[0]: error}
    errors = dict[str, float]()
    for name in flipping:
        others = runs.nodes.keys() - {name}
        errors[name], _, _ = runs.run(others, ())
    return errors


def find_deciding(capture: Capture) -> dict[str, fx.Node]:
    """Operations upstream of outputs that compute discrete values or a step function from floating-point values."""
    nodes = list(capture.graph_module.graph.nodes)
    reaching = set(reach((n for n in nodes if n.op == "output"), lambda n: n.all_input_nodes))

    def computes_numbers(n: fx.Node) -> list[bool]:
        return [x.is_floating_point() or x.is_complex() for x in tensors_in(n.meta.get("val"))]

    def decides(n: fx.Node) -> bool:
        row = row_of(n)
        reads_numbers = any(any(computes_numbers(source)) for source in n.all_input_nodes)
        if row.packet == "getitem" or row.asks_shape or row.asks_finite or not reads_numbers:
            return False
        several = [user for user in n.users if user in reaching and row_of(user).packet == "getitem"]
        return row.steps or not all(all(computes_numbers(one)) for one in several or [n])

    return {n.name: n for n in nodes if n.op == "call_function" and n in reaching and decides(n)}


class _LowRuns:
    """Runs a model in low precision, with some of the FP32 run's decisions. nodes: the operations that decide."""

    def __init__(
        self, measurement: Measurement, format: str, output_metric: OutputMetric, nodes: Mapping[str, fx.Node]
    ) -> None:
        self.measurement = measurement
        self.format = format
        self.output_metric = output_metric
        self.nodes = nodes
        self._round = rounder(measurement.capture, format)
        self._reference = [x.detach() for x in measurement.outputs]
        self._low = {name for name, errors in measurement.errors.items() if errors[format].unsupported is None}

    def run(
        self, fixed: Iterable[str], counted: Collection[str], wide: Collection[str] = ()
    ) -> tuple[float, dict[str, Decision], set[str]]:
        """Return the outputs' error, a Decision per operation in `counted`, and names of operations with changed
        results.

        fixed: operations that take FP32's decisions. wide: operations that run in FP32. A failed run has the error inf.
        """
        beat()
        capture, values = self.measurement.capture, self.measurement.values
        kept = {name: values[name] for name in fixed}
        low = SubsetLowPrecision(capture, self._low - set(wide), self.format, self._round, kept)
        executor = Executor(capture.graph_module, low, before=Replay(values))
        seen, changed, result = dict[str, Decision](), set[str](), None
        try:
            with torch.no_grad():
                for n, result in executor.steps(*self.measurement.flat_inputs):
                    if n.name in counted:
                        seen[n.name] = self._count_flips(n, low.receive(n, executor.value_of), widen(result))
                        changed |= {n.name} if chooses_otherwise(n, widen(result), values) else set()
            error, _ = self.output_metric(self._reference, tensors_in(widen(result)))
        except Exception as failure:  # a shape that depends on a decision may not fit
            let_through(failure)
            error = math.inf
        return error * self.output_metric.unit, seen, changed

    def _count_flips(self, n: fx.Node, arriving: ValueOf, result: Any) -> Decision:
        """The flips of one operation's decisions in a run. arriving: {node: its value in the run}, as a function."""
        values = self.measurement.values
        node = self.measurement.capture.nodes[n.name]
        about = n.name, node.op, node.owner, node.source
        scored = read_scores(n, lambda source: values[source.name], lambda source: widen(arriving(source)))
        if scored is None:
            pairs = zip(tensors_in(values[n.name]), tensors_in(result), strict=True)
            ours, theirs = next((a, b) for a, b in pairs if row_of(n).steps or not is_number(a))
            differ = disagreement(ours, theirs) if ours.shape == theirs.shape else 1.0
            return Decision(*about, ours.numel(), differ, None, None)
        criterion, reference, low = scored
        margins = find_margins(criterion, reference)
        k = criterion.option("k", 0)
        measured = value(criterion, reference, low)
        change = 0.0
        predicted = 0.0
        if margins is not None:
            change = margins.change(reference, low, near=True)
            predicted = margins.flips(change)
        if k:  # the value is the share of equal entries in the top k, [.., entries of a row]
            count = k * reference.numel() // reference.shape[-1]
            seen = 1 - measured
        else:  # the value is the share of entries on the other side of the threshold
            count = reference.numel()
            seen = measured
        return Decision(*about, count, seen, predicted if math.isfinite(change) else None, seen)

    def find_scorer(self, name: str) -> tuple[str, set[str]]:
        """Find where the scores of a decision come from: the module of the nearest matrix product before it.

        Returns the module's path, and the names of its operations and of those from there to the decision. If there is no
        product nearby, the path is that of the decision's own module.
        """
        nodes, level, result = self.measurement.capture.nodes, [self.nodes[name]], {name}
        for _ in range(LEVELS):
            level = [source for n in level for source in n.all_input_nodes if source.name in nodes]
            result |= {n.name for n in level}
            made = next((nodes[n.name].owner for n in level if row_of(n).product), None)
            if made is not None:
                return made, result | {each for each, node in nodes.items() if made and within(node.owner, made)}
        return nodes[name].owner, result


def read_scores(n: fx.Node, ours: ValueOf, theirs: ValueOf) -> tuple[Criterion, torch.Tensor, torch.Tensor] | None:
    """Express a decision as a criterion on scores: the k largest of a row, or the scores above zero. Returns the
    criterion, FP32's scores, and the scores in low precision.

    None for decisions without margins: equality, random draws, rounding to integers, the order of all entries.
    """
    given = arguments_with_defaults(n)
    packet = row_of(n).packet

    def read(argument: Any, value_of: ValueOf) -> torch.Tensor:
        """An argument in one of the two runs."""
        value = value_of(argument) if isinstance(argument, fx.Node) else argument
        return torch.as_tensor(value).double()

    if packet in ("gt", "ge", "lt", "le"):
        sign = 1 if packet in ("gt", "le") else -1  # equality counts as below for gt and le, as above for ge and lt
        margins = [read(given["self"], run) - read(given["other"], run) for run in (ours, theirs)]
        x, y = ((sign * margin).nan_to_num() for margin in margins)
        return ABOVE, x, y
    if packet in ("sort", "argsort"):
        k = _count_read(n, given["dim"])
    elif packet in ("topk", "max", "min", "argmax", "argmin"):
        k = given.get("k", 1)
    else:
        return None
    if k is None:
        return None
    smallest_first = packet in ("min", "argmin") or given.get("largest") is False or given.get("descending") is False
    x, y = (_rows_of_scores(read(given["self"], run), given.get("dim"), smallest_first) for run in (ours, theirs))
    kind = "top1" if k == 1 and packet != "topk" else "topk"
    return Criterion("", kind, 0.0, (("k", k),)), x, y


def _rows_of_scores(x: torch.Tensor, dim: int | None, smallest_first: bool) -> torch.Tensor:
    """Scores [.., entries of a row], the largest of which are chosen. dim: the dimension of the rows, None for a single
    row."""
    x = x.nan_to_num()
    if smallest_first:
        x = -x
    return x.flatten() if dim is None else x.movedim(dim, -1)


def _count_read(n: fx.Node, dim: int) -> int | None:
    """How many leading entries of a sorted dimension are read; None if any operation reads other entries."""
    indices = [n]
    if row_of(n).packet == "sort":
        indices = [user for user in n.users if user.args[1] == 1]
    sizes = tensors_in(n.meta["val"])[0].shape or (1,)
    same_dim = (dim, dim - len(sizes), dim + len(sizes))  # a dimension may count from the end
    count = 0
    for index in indices:
        for reader in index.users:
            given = arguments_with_defaults(reader)
            is_select = "end" not in given
            start = given.get("start") or given.get("index", is_select)
            if given.get("dim") not in same_dim or start:
                return None
            read = range(sizes[dim])[: given.get("end", 1)]
            count = max(count, len(read))
    return count if 0 < count < sizes[dim] else None
