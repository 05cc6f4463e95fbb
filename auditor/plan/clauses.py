"""Clauses that say why something is not low, worded once, and which of them is true of an operation in a low module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ..execution.policy import Policy, choice_from_labels
from ..execution.resolve import Resolution, is_low
from ..numerics.formats import label
from ..numerics.operations import operation
from ..records import Node, Reason
from .problem import Problem
from .solve import Candidate

GAINS = {"time": "time", "memory": "memory", "flops": "FP32 FLOPs"}
"""{objective: what a plan saves}."""


def count(number: int, noun: str) -> str:
    """`1 module`, `3 modules`."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def apart(*values: float) -> tuple[str, ...]:
    """The values in two significant digits, or in as many more as it takes to tell those apart that differ."""
    for digits in range(2, 6):
        texts = tuple(f"{value:.{digits}g}" for value in values)
        if len(set(texts)) == len(set(values)):
            break
    return texts


def gained(saves: float, objective: str) -> str:
    """What lowering something gains, a share; nothing where it would cost."""
    return (
        f"saves at most {max(saves, 0.001):.1%} of the {GAINS[objective]}"
        if saves > 0
        else f"saves no {GAINS[objective]}"
    )


def no_gain(most: float, objective: str, *, alone: bool) -> str:
    """Why what could be low is not. most: what of all such saves most; alone: not all of it holds the budget together."""
    short = ", below the threshold for one more change of precision" if most > 0 else ""
    return f"lowering it{' alone' if alone else ''} {gained(most, objective)}{short}"


def added(before: float, after: float, budget: float, margin: float, saves: float, objective: str, ran: bool) -> str:
    """Why what would gain something is not lowered: the budget, of which a plan uses the share `margin`."""
    if not math.isfinite(after):
        return "low, it makes the model fail or its outputs non-finite"
    first, second, allowed = apart(before, after, budget)
    return (
        f"lowering it {'takes' if ran else 'is predicted to take'} the error from {first} to {second}, where plans use "
        f"{margin:.0%} of the budget of {allowed}, and {gained(saves, objective)}"
    )


def operation_reasons(problem: Problem, chosen: Candidate) -> tuple[Reason, ...]:
    """A reason for every operation that is not low though its module is, and for those without a precision."""
    precision, nodes = choice_from_labels(chosen.precision), problem.capture.nodes
    how, resolution = problem.running(precision), problem.resolve(precision)
    found, known = list[Reason](), dict[str, Reason]()
    for n in problem.capture.graph_module.graph.nodes:
        node, name = nodes.get(n.name), n.name
        if node is None or is_low(resolution.computed(name)) or (not node.floating and resolution.touches_low(name)):
            continue
        setting = how.setting(name)
        if not node.floating:
            reason = Reason("not-floating", "it is no floating-point operation")
        elif setting.kept and node.function and chosen.precision.get(problem.variable(name)) != "fp32":
            function = node.function.path
            by = next(call.path for call in node.calls if function in precision.keep.get(call.path, ()))
            reason = Reason("inherited", f"{function} stays FP32 in all of {by or 'the model'}", by=by)
        elif not setting.kept and setting.precision != "fp32":
            writes = any(isinstance(value, torch.dtype) for value in (*n.args, *n.kwargs.values()))
            reason = known[name] = _why(problem, resolution, how, node, writes, known)
        else:
            continue  # it has a reason of its own, or its module has
        if name not in problem.capture.twins:
            found.append(replace(reason, operations=(name,)))
    return together(found)


def together(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Reasons that say the same of several, once; of what gains nothing, with the largest numbers."""
    found: dict[tuple[Reason, bool], list[Reason]] = {}
    for reason in reasons:
        alike = replace(reason, modules=(), operations=())
        idle = reason.kind == "no-gain" and reason.adds is not None
        found.setdefault((replace(alike, adds=None, saves=None) if idle else alike, idle), []).append(reason)
    return tuple(
        replace(
            alike,
            modules=tuple(path for each in several for path in each.modules),
            operations=tuple(name for each in several for name in each.operations),
            adds=max((each.adds for each in several if each.adds is not None), default=None),
            saves=max((each.saves for each in several if each.saves is not None), default=None),
        )
        for (alike, _), several in found.items()
    )


def _why(
    problem: Problem, resolution: Resolution, how: Policy, node: Node, writes: bool, known: Mapping[str, Reason]
) -> Reason:
    """Why an operation in a low module is not low.

    writes: whether a dtype is among its arguments. known: reasons of operations before it. What autocast and the author decide
    has no name in it, so that what repeated blocks have in common is one reason.
    """
    given, setting = label(resolution.computed(node.name)), how.setting(node.name)
    inside = setting.in_region(node.region)
    if node.dtype in ("float64", "complex64", "complex128"):
        return Reason("author", f"the author computes in {node.dtype}, which no plan lowers")
    if setting.autocast and not inside.autocast:
        return Reason("author", "the author switches autocast off around it")
    if inside.precision != setting.precision:
        return Reason("author", f"the author runs it in {label(inside.precision)}, whatever the plan")
    if writes:
        return Reason("author", f"the author asks for {given}")
    if how.casts(node).autocast in ("fp32", "fp32_unless_dtype"):
        runner = problem.strategy if problem.how.regional else "the autocast region around it"
        return Reason("strategy", f"{runner} runs {_packet(node)} in FP32 by itself")
    handed = (source for source in node.inputs if resolution.dtypes.get(source) == resolution.computed(node.name))
    if (source := next(handed, None)) is None:
        return Reason("author", f"the author makes values in {given}")
    if (before := known.get(source)) is not None:
        if before.kind == "inherited":
            return before
        return Reason("inherited", f"{given} reaches it from {_packet(problem.capture.nodes[source])}: {before.words}")
    if source in problem.capture.nodes:
        return Reason("inherited", f"{given} reaches it from {source}", by=source)
    place = next(p for p in problem.capture.placeholders if p.name == source)
    above, _, leaf = (place.fqn or source).rpartition(".")
    if place.kind == "constant" or (above and above == node.owner):
        name = f"the {place.kind}{f' {leaf} of its module' if above else ''}"
        return Reason("inherited", f"{given} reaches it from {name}")
    name = place.fqn or source
    return Reason("inherited", f"{given} reaches it from the {place.kind} {name}", by=name)


def _packet(node: Node) -> str:
    return operation(node.op).packet or node.op
