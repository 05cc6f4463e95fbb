"""Why everything that stays FP32 under a plan does: what forbids it, or what lowering it alone would add and save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..execution.policy import Policy, choice_from_scopes, choice_keeping
from ..execution.resolve import Resolution, is_low
from ..numerics.formats import label
from ..numerics.operations import operation
from ..paths import function_in, module_of, of_function
from ..records import Finding, Node, Plan, Reason
from .mincut import Candidate
from .modules import Modules, as_candidate, evaluate
from .problem import Problem
from .search import MARGIN, WORTH

GAINS = {"time": "time", "memory": "memory", "flops": "FP32 FLOPs"}
"""{objective: what a plan saves}."""


def _by_saving(problem: Problem, chosen: Candidate) -> list[str]:
    """What a choice keeps in FP32, what saves most first."""
    return sorted(_kept(problem, chosen), key=lambda owner: (-problem.energy.saving(owner), owner))


def improve(space: Modules, chosen: Candidate, limit: float) -> Candidate:
    """The choice with what gains low as well, one module after the other, as long as replays stay within the limit."""
    problem = space.problem
    for owner in _by_saving(problem, chosen):
        if space.left <= 0:
            break
        if owner == module_of(owner):
            point = _lowered(problem, chosen, [owner])
            gains = point.feasible and point.price < (1 - WORTH) * chosen.price
            if gains and space.may_hold(chosen, point, limit) and space.holds(point, limit):
                chosen = point
    return chosen


def with_reasons(space: Modules, plan: Plan, findings: Sequence[Finding]) -> Plan:
    """The plan with one reason for every module and operation that it does not run low, and the least that has to stay."""
    problem, chosen = space.problem, as_candidate(space.problem, choice_from_scopes(plan.scopes))
    alone = {owner: _lowered(problem, chosen, [owner]) for owner in _by_saving(problem, chosen)}
    told = {owner: _forbidden(problem, point, chosen, owner) for owner, point in alone.items()}
    idle = {owner: low for owner, low in alone.items() if told[owner] is None and low.price >= chosen.price}
    low = _lowered(problem, chosen, idle)
    harmless = low == chosen or (space.may_hold(chosen, low, space.budget) and space.holds(low, space.budget))
    shown = [each for each in idle.values() if each.predicted_error > chosen.predicted_error]
    if shown and not harmless:  # one run says whether any of it holds by itself
        space.holds(min(shown, key=lambda low: low.predicted_error), space.budget)
    most = max((_saved(chosen, each) for each in idle.values()), default=0.0)
    modules = together(
        replace(told[owner] or _reason(space, chosen, alone[owner], most, harmless), modules=(owner,))
        for owner in _kept(problem, chosen)
    )
    scopes = {
        path: replace(choice, because=_codes_and_words(problem, path, modules, findings))
        if choice.precision == "fp32" or choice.keep
        else choice
        for path, choice in plan.scopes.items()
    }
    reasons = (*_of_operations(problem, modules), *operation_reasons(problem, chosen))
    return replace(
        plan, scopes=scopes, reasons=reasons, least=kept_in(problem, low if harmless else chosen) if modules else ()
    )


def _saved(chosen: Candidate, low: Candidate) -> float:
    """Share of what a choice costs that another saves."""
    return (chosen.cost - low.cost) / chosen.cost if chosen.cost else 0.0


def _reason(space: Modules, chosen: Candidate, low: Candidate, most: float, harmless: bool) -> Reason:
    """Why what could be low is not, from the log of replays where it is there. most: what of all that gains nothing saves most;
    harmless: whether the budget holds with all that low."""
    before, budget, objective, gains = (
        space.before(chosen),
        space.budget,
        space.problem.objective,
        low.price < chosen.price,
    )
    held = harmless and not gains  # in a replay with more than this low
    ran = not held and space.key(low) in space.log
    after = space.error(low) if ran else space.after(chosen, low)
    adds, saves = after - before if math.isfinite(after) else None, max(_saved(chosen, low), 0.0)
    if gains or not (held or after <= budget):
        kind = "margin" if after <= budget else "budget"
        words = added(before, after, budget, MARGIN, saves, objective, ran)
    else:
        kind, words = "no-gain", no_gain(most if saves else 0.0, objective, alone=not held)
    return Reason(kind, words, adds=adds, left=max(budget - before, 0.0), saves=saves, ran=ran)


def _codes_and_words(
    problem: Problem, path: str, reasons: Sequence[Reason], findings: Sequence[Finding]
) -> tuple[str, ...]:
    """Rules that fired on the scope's unsafe and sensitive nodes that are kept, then the reasons of what is."""
    said = [
        (of_function(each), reason.words) for reason in reasons for each in reason.modules if module_of(each) == path
    ]
    functions = {function_in(*found) for found, _ in said if found is not None}
    own = (node.name for node in problem.operations_of.get(path, ()))
    kept = {name for name in own if not functions or problem.variable(name) in functions}
    marked = {name for name in kept if problem.verdicts[name].verdict != "safe"}
    codes = sorted({f.rule for f in findings if f.node in marked and problem.format in f.formats})
    return (*codes, *(words if found is None else f"{found[1]}: {words}" for found, words in said))


def _of_operations(problem: Problem, reasons: Sequence[Reason]) -> Iterator[Reason]:
    """The reasons of kept functions as those of their operations."""
    for reason in reasons:
        modules = tuple(path for path in reason.modules if path == module_of(path))
        if modules:
            yield replace(reason, modules=modules)
        if functions := set(reason.modules).difference(modules):
            nodes, twins = problem.capture.nodes, problem.capture.twins
            names = tuple(name for name in nodes if problem.variable(name) in functions and name not in twins)
            yield replace(reason, modules=(), operations=names)


def kept_in(problem: Problem, point: Candidate) -> tuple[str, ...]:
    """Modules that a choice keeps in FP32, whole or in part, of those with something in them that has a precision."""
    kept = [owner for owner in _kept(problem, point) if _without_operations(problem, owner) is None]
    return tuple(dict.fromkeys(module_of(owner) for owner in kept))


def _kept(problem: Problem, point: Candidate) -> list[str]:
    """Modules in FP32, and functions that low ones keep so."""
    kept = [owner for owner in problem.energy.scopes if owner in point.high]
    return [owner for owner in kept if owner == module_of(owner) or module_of(owner) not in point.high]


def _without_operations(problem: Problem, owner: str) -> Reason | None:
    nodes = [node for node in problem.operations_of.get(module_of(owner), ()) if _in(problem, node.name, owner)]
    if not nodes:
        return Reason("not-floating", "it has no operations of its own, only modules in it")
    low = problem.lowest.resolution
    if any(node.floating or low.touches_low(node.name) for node in nodes):
        return None
    return Reason("not-floating", "it has no floating-point operations")


def _in(problem: Problem, name: str, owner: str) -> bool:
    """Whether a node is a module's own, or part of a function in one."""
    return owner in (problem.capture.nodes[name].owner, problem.variable(name))


def lowered_with(problem: Problem, owner: str) -> tuple[str, ...]:
    """What is low if a module is lowered: itself, what shares a weight with it, and the functions in it that could stay FP32."""
    group = {*problem.energy.together(owner)}
    functions = {function_in(path, name) for path in group for name in problem.exceptions.get(path, ())}
    return tuple(sorted(group | (functions - problem.lowest.raised)))


def _lowered(problem: Problem, chosen: Candidate, owners: Iterable[str]) -> Candidate:
    """The choice with these low, and what goes along; a function whose keeping lets others be low stays, unless it is asked for."""
    kept = {path for path in problem.lowest.raised if path != module_of(path)}
    return evaluate(problem, (chosen.high | kept).difference(*(lowered_with(problem, owner) for owner in owners)))


def _forbidden(problem: Problem, point: Candidate, chosen: Candidate, owner: str) -> Reason | None:
    """Why lowering a module is out of the question; None where it is not. point: with it low."""
    if (reason := _without_operations(problem, owner)) is not None:
        return reason
    if owner in point.high:
        return Reason("author", "the author switches autocast off around it")
    if point.feasible:
        return None
    now, then = (problem.resolve(choice_keeping(each.high, problem.format)) for each in (chosen, point))
    nodes, group = problem.capture.nodes, lowered_with(problem, owner)
    broken = [name for name in nodes if problem.forbidden(then, name) and not problem.forbidden(now, name)]
    if not broken:
        return None

    def weight(name: str) -> tuple[bool, bool, float]:
        known = problem.contribution(name, problem.format)
        return _in(problem, name, owner), nodes[name].owner in group, known.isolated if known else 0.0

    worst = max(broken, key=weight)
    name, where, verdict = problem.capture.twins.get(worst, worst), nodes[worst].owner, problem.verdicts[worst]
    kind, why = verdict.verdict, f"{name} is {verdict.verdict}: {verdict.reason}"
    if worst in then.conflicts and kind not in ("unsafe", "untested"):
        kind, why = "conflict", f"{name} would be handed tensors of two dtypes, which raises an error"
    place = where or "the whole model"
    if _in(problem, worst, owner):
        return Reason(kind, why, by=name)
    if kind == "conflict" and owner in problem.lowest.raised and owner != module_of(owner):
        reader = name if where == module_of(owner) else f"{name} in {place}"
        why = why.replace(name, reader, 1)
        return Reason(kind, f"it gives FP32 anyhow; with no function kept {why}", by=name)
    if where in group:
        return Reason("tied", f"it shares a weight with {place}, where {why}", by=where)
    inside = where == module_of(owner)
    words = f"low, it would hand on low values{'' if inside else f' to {place}, where'}{':' if inside else ''} {why}"
    return Reason("inherited", words, by=name if inside else where)


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
    precision, nodes = choice_keeping(chosen.high, problem.format), problem.capture.nodes
    how, resolution = problem.running(precision), problem.resolve(precision)
    result, known = list[Reason](), dict[str, Reason]()
    for n in problem.capture.graph_module.graph.nodes:
        node, name = nodes.get(n.name), n.name
        if (
            node is None
            or is_low(resolution.computed_format(name))
            or (not node.floating and resolution.touches_low(name))
        ):
            continue
        setting = how.setting(name)
        if not node.floating:
            reason = Reason("not-floating", "it is no floating-point operation")
        elif setting.kept and node.function and problem.variable(name) not in chosen.high:
            function = node.function.path
            by = next(call.path for call in node.calls if function in precision.keep.get(call.path, ()))
            reason = Reason("inherited", f"{function} stays FP32 in all of {by or 'the model'}", by=by)
        elif not setting.kept and setting.precision != "fp32":
            writes = any(isinstance(value, torch.dtype) for value in (*n.args, *n.kwargs.values()))
            reason = known[name] = _why(problem, resolution, how, node, writes, known)
        else:
            continue  # it has a reason of its own, or its module has
        if name not in problem.capture.twins:
            result.append(replace(reason, operations=(name,)))
    return together(result)


def together(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Reasons that say the same of several, once, with the largest of their numbers."""
    alike: dict[tuple[str, str, str | None], list[Reason]] = {}
    for reason in reasons:
        alike.setdefault((reason.kind, reason.words, reason.by), []).append(reason)
    return tuple(
        replace(
            several[0],
            modules=tuple(path for each in several for path in each.modules),
            operations=tuple(name for each in several for name in each.operations),
            adds=max((each.adds for each in several if each.adds is not None), default=None),
            saves=max((each.saves for each in several if each.saves is not None), default=None),
            ran=all(each.ran for each in several),
        )
        for several in alike.values()
    )


def _why(
    problem: Problem, resolution: Resolution, how: Policy, node: Node, writes: bool, known: Mapping[str, Reason]
) -> Reason:
    """Why an operation in a low module is not low.

    writes: whether a dtype is among its arguments. known: reasons of operations before it. What autocast and the author decide
    has no name in it, so that what repeated blocks have in common is one reason.
    """
    given, setting = label(resolution.computed_format(node.name)), how.setting(node.name)
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
    handed = (
        source for source in node.inputs if resolution.dtypes.get(source) == resolution.computed_format(node.name)
    )
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
