"""The search space of plans over modules: proposes choices of precisions by minimum cuts, improves a choice by replays,
and explains why modules and operations stay in FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from ..execution.mixtures import find_mixtures
from ..execution.policy import Policy, choice_from_scopes, choice_keeping
from ..execution.resolve import Resolution, is_low
from ..numerics.formats import label
from ..numerics.operations import operation
from ..records import Finding, Node, Plan, Reason
from ..records.paths import FP32_OUTPUT, function_in, module_of
from ..rulebook.mixed import Describer
from .outputs import outputs_in, outputs_of
from .problem import Problem
from .search import MARGIN, MOST_OFF, WORTH, Candidate, Space

SHORTER = 0.05
"""Share by which a plan entirely in low precision, which is simpler, may exceed the best plan's time and cost."""

REPLAYS = 4
"""Maximum number of replays of the recorded graph for improving and explaining one choice of precisions."""

DECIDING = 2
"""Maximum number of further replays, of modules whose predicted error is nearest to the budget."""

NEAR = 1.6
"""Factor by which a predicted increase of the error may be off; a prediction that is nearer to the budget decides nothing."""

GAINS = {"time": "time", "memory": "memory", "flops": "FP32 FLOPs"}
"""{objective: noun for the quantity that a plan saves}."""


class Modules(Space):
    """All choices of module precisions for one problem. run: returns the error of the recorded graph under a
    policy; left: number of replays still allowed for improving and explaining a choice; what: words for the error."""

    def __init__(self, problem: Problem, run: Callable[[Policy], float], budget: float, what: str = "error") -> None:
        super().__init__()
        self.problem, self.budget, self.what, self._replayed = problem, budget, what, run
        self.nothing, self.low = problem.evaluate(problem.energy.scopes), problem.evaluate(())
        self.left, self.least = REPLAYS, problem.least

    def replay(self, point: Candidate) -> float:
        """Output error of a replay of the recorded graph under a choice of precisions."""
        return self._replayed(self.problem.policy_for(choice_keeping(point.high, self.problem.format)))

    def before(self, point: Candidate) -> float:
        """Error of a choice of precisions: measured if its replay gave a finite error, otherwise predicted."""
        ran = self.log.get(point.high, math.inf)
        return ran if math.isfinite(ran) else point.predicted_error

    def after(self, before: Candidate, point: Candidate) -> float:
        """Predicted error of `point`, which has more modules in low precision than `before`; squared errors add up."""
        return math.sqrt(max(self.before(before) ** 2 + point.predicted_error**2 - before.predicted_error**2, 0.0))

    def holds(self, before: Candidate, point: Candidate, limit: float) -> bool:
        """Whether a replay of `point`, with more in low precision than `before`, has an error within `limit`. False
        without a replay if none is left, or if even 1 / MOST_OFF of the predicted increase is too much."""
        known = self.before(before)
        if not (point.feasible and known + (self.after(before, point) - known) / MOST_OFF <= limit):
            return False
        if point.high not in self.log:
            if self.left <= 0:
                return False
            self.left -= 1
        return self.error(point) <= limit

    def doubt(self, before: Candidate, point: Candidate) -> float:
        """Factor by which the predicted increase of the error differs from what the budget allows; inf if it is known."""
        if not point.feasible or point.high in self.log:
            return math.inf
        known = self.before(before)
        increase, allowed = self.after(before, point) - known, self.budget - known
        if not (increase > 0 and allowed > 0):
            return math.inf
        return max(increase / allowed, allowed / increase)

    def within_budget(self) -> list[Candidate]:
        """[the choice of low precision everywhere], if it meets the budget without unsafe operations; otherwise []."""
        return [self.low] if self.low.feasible and self.error(self.low) <= self.budget else []

    def reach(self) -> float | None:
        """Smallest error above 0 of any replay, one of them with only the least harmful module in low precision."""
        energy = self.problem.energy
        alone = (self.problem.evaluate(self.nothing.high.difference(energy.together(one))) for one in energy.scopes)
        gaining = [point for point in alone if point.cost < self.nothing.cost]
        if gaining:
            self.error(min(gaining, key=lambda point: point.predicted_error))
        return min((error for error in self.log.values() if 0 < error < math.inf), default=None)

    def propose(self, allowed: float) -> Candidate:
        """The cheapest choice with a predicted error of at most `allowed`; or everything in low precision, if that
        meets the budget and exceeds the choice's time and cost by at most SHORTER."""
        low, point = self.low, self.problem.cheapest(allowed)
        near = low.seconds <= (1 + SHORTER) * point.seconds and low.cost <= (1 + SHORTER) * point.cost
        return low if near and self.within_budget() else point


def improve(space: Modules, chosen: Candidate, limit: float) -> Candidate:
    """Move FP32 modules to low precision, one by one, with or without FP32 outputs of their matrix products. A change
    is kept if it saves at least the share WORTH, and the error of its replay is at most `limit`."""
    problem = space.problem
    for owner in sorted(_fp32_owners(problem, chosen), key=lambda owner: (-problem.energy.saving_of(owner), owner)):
        low = _lower(problem, chosen, [owner])
        wide = problem.evaluate(low.high | outputs_in(problem, owner))
        points = (*[low][: owner == module_of(owner)], *[wide][: wide != low])
        cheaper = (point for point in points if point.price < (1 - WORTH) * chosen.price)
        chosen = next((point for point in cheaper if space.holds(chosen, point, limit)), chosen)
        if wide not in (low, chosen):
            del problem.evaluated[wide.high]  # not read again; of a deep model, each would occupy much memory
    return chosen


def as_candidate(problem: Problem, plan: Plan) -> Candidate:
    """The choice of precisions that a plan makes."""
    choice = choice_from_scopes(plan.scopes)
    return problem.evaluate({x for x in problem.energy.scopes if choice(x) == "fp32"} | outputs_of(choice))


def with_reasons(space: Modules, plan: Plan, findings: Sequence[Finding]) -> Plan:
    """The plan with reasons for all modules and operations in FP32; its `least`: the modules that have to be FP32."""
    problem, chosen = space.problem, as_candidate(space.problem, plan)
    outputs = sorted(path for path in chosen.high if path.endswith(FP32_OUTPUT))
    alone = {owner: _lower(problem, chosen, [owner]) for owner in (*_fp32_owners(problem, chosen), *outputs)}
    forbidden = {owner: _find_prohibition(space, point, chosen, owner) for owner, point in alone.items()}
    may = [owner for owner, why in forbidden.items() if why is None or why.kind == "not-floating"]
    idle = [owner for owner in may if alone[owner].price >= chosen.price]
    low = _lower(problem, chosen, idle)
    harmless = low == chosen or space.holds(chosen, low, space.budget)
    low = low if harmless else next((alone[x] for x in idle if space.holds(chosen, alone[x], space.budget)), chosen)
    told = [owner for owner in may if not (harmless and owner in idle)]
    _decide(space, chosen, [alone[owner] for owner in told])
    saves = {owner: max(1 - point.cost / chosen.cost, 0.0) if chosen.cost else 0.0 for owner, point in alone.items()}
    most = max((saves[owner] for owner in idle), default=0.0)

    def reason(owner: str) -> Reason:
        own = [node.name for node in _operations(problem, owner)]
        why = forbidden[owner] or _explain(space, chosen, alone[owner], saves[owner], most, harmless)
        judged = [n for n in own if problem.verdicts[n].verdict != "safe"] if why.kind != "no-gain" else []
        fired = {x.rule for x in findings if x.node in judged and problem.format in x.formats and x.severity != "info"}
        words, wide = why.words, "a low-precision output"
        if owner in outputs:
            words = words.replace("in low precision", f"with {wide}").replace("low precision", wide)
        why = replace(why, words=words, saves=saves[owner], rules=tuple(sorted(fired)))
        if owner == module_of(owner):
            return replace(why, modules=(owner,))
        return replace(why, functions=(owner,), operations=tuple(n for n in own if n not in problem.capture.twins))

    kept = _fp32_owners(problem, low)
    least = dict.fromkeys(module_of(owner) for owner in kept if _has_floats(problem, owner))
    reasons = (*merge_alike(map(reason, alone)), *operation_reasons(problem, chosen))
    return replace(plan, reasons=reasons, least=tuple(least))


def _decide(space: Modules, chosen: Candidate, points: Iterable[Candidate]) -> None:
    """Replay the points whose predicted errors are too near the budget to tell on which side of it they are."""
    doubts = {point.high: (space.doubt(chosen, point), point) for point in points}
    near = [(doubt, point) for doubt, point in doubts.values() if doubt <= NEAR]
    for _, point in sorted(near, key=lambda pair: pair[0])[:DECIDING]:
        space.error(point)


def _explain(space: Modules, chosen: Candidate, low: Candidate, saves: float, most: float, harmless: bool) -> Reason:
    """The reason why a module that could run in low precision does not, from replays if possible. most: largest saving
    of the modules that would save too little; harmless: whether the budget is met with all of them low."""
    before, budget, objective = space.before(chosen), space.budget, space.problem.objective
    idle = low.price >= chosen.price
    ran = not (idle and harmless) and low.high in space.log
    after = space.error(low) if ran else space.after(chosen, low)
    adds, left = after - before if math.isfinite(after) else None, max(budget - before, 0.0)
    if idle and (harmless or after <= budget):
        gain = _too_small(most if saves else 0.0, objective)
        words = f"low precision {'' if harmless else 'only '}there {gain}"
        return Reason("no-gain", words, adds=adds, left=left)
    if after <= before or f"{after:.3g}" == f"{before:.3g}":
        return _explain_unchanged(space, after, saves, adds, left, ran)
    raises = f"{'increases' if ran else 'is predicted to increase'} the {space.what}"
    words = explain_budget(before, after, budget, saves, objective, raises, space.failures.get(low.high, ""))
    return Reason("margin" if after <= budget else "budget", words, adds=adds, left=left, ran=ran)


def _explain_unchanged(
    space: Modules, after: float, saves: float, adds: float | None, left: float, ran: bool
) -> Reason:
    """The reason why a module stays in FP32 whose low precision does not raise the error: it saves too little, or no run
    was left that could verify it."""
    leaves = f"low precision there {'leaves' if ran else 'is predicted to leave'} the {space.what} at {after:.3g}"
    objective = space.problem.objective
    if saves < WORTH:
        return Reason("no-gain", f"{leaves}, and {_too_small(saves, objective)}", adds=adds, left=left)
    gain = explain_gain(saves, objective)
    words = f"{leaves}, and {gain}{'' if ran else '; the audit had no run left to verify this'}"
    return Reason("margin" if after <= space.budget else "budget", words, adds=adds, left=left, ran=ran)


def _too_small(saves: float, objective: str) -> str:
    """Words for a saving that is too small for one more change of precision."""
    gain = explain_gain(saves, objective)
    return f"{gain}, too little for one more change of precision" if saves > 0 else gain


def _fp32_owners(problem: Problem, point: Candidate) -> list[str]:
    """FP32 modules, and functions that low-precision modules keep in FP32."""
    kept = [owner for owner in problem.energy.scopes if owner in point.high]
    return [owner for owner in kept if owner == module_of(owner) or module_of(owner) not in point.high]


def _has_floats(problem: Problem, owner: str) -> bool:
    """Whether any operation of `owner` (see `_operations`) can run in low precision."""
    return any(node.floating or problem.lowest.touches_low(node.name) for node in _operations(problem, owner))


def _operations(problem: Problem, owner: str) -> list[Node]:
    """Operations of `owner`: directly in this module or, if `owner` is a function in a module, of this function."""
    own, path = problem.operations_of.get(module_of(owner), ()), owner.removesuffix(FP32_OUTPUT)
    if path != owner:
        return [node for node in own if node.function and path == function_in(node.owner, node.function.path)]
    return [node for node in own if owner in (node.owner, problem.variable(node.name))]


def lowered_with(problem: Problem, owner: str) -> tuple[str, ...]:
    """All owners that move to low precision together with `owner`: modules that share a weight, and kept functions in
    these modules, except those that are FP32 to avoid a dtype conflict."""
    group = {*problem.energy.together(owner)}
    functions = {function_in(path, name) for path in group for name in problem.exceptions.get(path, ())}
    return tuple(sorted(group | (functions - problem.forced_fp32)))


def _lower(problem: Problem, chosen: Candidate, owners: Iterable[str]) -> Candidate:
    """`chosen`, but with `owners`, and everything that `lowered_with` returns for them, in low precision. Functions
    that are FP32 to avoid a dtype conflict remain FP32 unless `owners` lists them."""
    kept = {path for path in problem.forced_fp32 if path != module_of(path)}
    return problem.evaluate((chosen.high | kept).difference(*(lowered_with(problem, owner) for owner in owners)))


def _find_prohibition(space: Modules, point: Candidate, chosen: Candidate, owner: str) -> Reason | None:
    """The reason why a module cannot run in low precision, or None. point: `chosen` with the module lowered."""
    problem = space.problem
    if not _has_floats(problem, owner):
        without = "has no floating-point" if _operations(problem, owner) else "contains only submodules, no"
        return Reason("not-floating", f"{without} operations")
    if owner in point.high:
        return Reason("author", "the model's code switches autocast off there")
    if point.feasible:
        return None
    now, then = (problem.resolve(choice_keeping(each.high, problem.format)) for each in (chosen, point))
    nodes, group = problem.capture.nodes, lowered_with(problem, owner)
    own = {node.name for node in _operations(problem, owner)}
    broken = [name for name in nodes if problem.is_forbidden(then, name) and not problem.is_forbidden(now, name)]
    if not broken:
        return None
    worst = max(broken, key=lambda name: (name in own, nodes[name].owner in group))
    name, where, verdict = problem.capture.twins.get(worst, worst), nodes[worst].owner, problem.verdicts[worst]
    inside = worst in own or where == module_of(owner)
    kind, by, place = verdict.verdict, name if inside else where, "" if inside else f" in {where or 'the whole model'}"
    why = f"{name}{place} is {kind}, since {verdict.reason}"
    if worst in then.conflicts and kind not in ("unsafe", "untested"):
        kind = "conflict"
        policy = problem.policy_for(choice_keeping(point.high, problem.format))
        why = f"{name}{place}{_line_of(nodes[worst])} {_mixed_words(space, policy, then, worst)}"
    if worst in own:
        return Reason(kind, why, by=by)
    if kind == "conflict" and owner in problem.forced_fp32 and owner != module_of(owner):
        return Reason(kind, f"its result is FP32 anyway; otherwise, {why}", by=name)
    if where in group:
        return Reason("tied", f"shares a weight with {where or 'the whole model'}, and {why}", by=where)
    return Reason("inherited", f"if it returned low precision: {why}", by=by)


def _line_of(node: Node) -> str:
    return f" ({node.source})" if node.source else ""


def _mixed_words(space: Modules, policy: Policy, resolution: Resolution, conflict: str) -> str:
    """What happens at an operation that gets two dtypes: what the run of the whole model in low precision raised there,
    otherwise what is predicted; and where the FP32 values were made."""
    origins = Describer(policy.capture).origins([find_mixtures(policy, resolution)[conflict]])
    wide = f"; the FP32 values come from {origins}" if origins else ""
    said, line = space.failures.get(space.low.high, ""), policy.capture.nodes[conflict].source
    if line and said.endswith(f"({line})"):
        return f"raises an error in a run of the whole model in {label(policy.format)}: {said.removesuffix(f' ({line})')}{wide}"
    return f"would get tensors of two dtypes, which raises an error{wide}"


def explain_gain(saves: float, objective: str) -> str:
    """Words for a saving: `saves at most 0.2% of the time`, or `saves no time` if it is not positive."""
    return f"saves {f'at most {max(saves, 0.001):.1%} of the' if saves > 0 else 'no'} {GAINS[objective]}"


def explain_budget(
    before: float, after: float, budget: float, saves: float, objective: str, raises: str, failure: str = ""
) -> str:
    """A text which says that low precision in a module causes too large an error, and how much it would save. failure:
    what a run of the model raised with low precision there."""
    if failure:
        return f"with low precision there, a run of the model raises an error: {failure}"
    if not math.isfinite(after):
        return "with low precision there, a run gave Inf or NaN, or exceeded the budget"
    gain = explain_gain(saves, objective)
    return f"low precision there {raises} from {before:.3g} to {after:.3g} (limit {MARGIN * budget:.3g}: the budget less a margin), and {gain}"


def operation_reasons(problem: Problem, chosen: Candidate) -> tuple[Reason, ...]:
    """A reason for each FP32 operation in a low-precision module, and for each operation on integers or booleans."""
    precision, nodes = choice_keeping(chosen.high, problem.format), problem.capture.nodes
    how, resolution = problem.policy_for(precision), problem.resolve(precision)
    result, known = list[Reason](), dict[str, Reason]()
    for n in problem.capture.graph_module.graph.nodes:
        node, typed = nodes.get(n.name), resolution.nodes[n.name]
        discrete = node is not None and not node.floating
        if node is None or is_low(typed.factors or typed.kernel) or (discrete and resolution.touches_low(n.name)):
            continue
        setting = how.setting(n.name)
        if discrete:
            reason = Reason("not-floating", "not a floating-point operation")
        elif setting.kept and node.function and problem.variable(n.name) not in chosen.high:
            function = node.function.path
            by = next(call.path for call in node.calls if function in precision.keep.get(call.path, ()))
            reason = Reason("inherited", f"{by or 'the model'} keeps every call of {function} in FP32", by=by)
        elif not setting.kept and setting.precision != "fp32":
            reason = known[n.name] = _explain_operation(problem, resolution, how, n, known)
        else:
            continue  # the operation's function or module has a reason
        if n.name not in problem.capture.twins:
            result.append(replace(reason, operations=(n.name,)))
    return merge_alike(result)


def merge_alike(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Merge reasons that differ only in module, function, operation and numbers; the largest numbers are kept."""
    alike: dict[Reason, list[Reason]] = {}
    for reason in reasons:
        alike.setdefault(Reason(reason.kind, reason.words, by=reason.by, rules=reason.rules), []).append(reason)
    return tuple(
        replace(
            several[0],
            modules=tuple(path for each in several for path in each.modules),
            operations=tuple(name for each in several for name in each.operations),
            functions=tuple(path for each in several for path in each.functions),
            adds=max((each.adds for each in several if each.adds is not None), default=None),
            saves=max((each.saves for each in several if each.saves is not None), default=None),
            ran=all(each.ran for each in several),
        )
        for several in alike.values()
    )


def _explain_operation(
    problem: Problem, resolution: Resolution, how: Policy, n: fx.Node, known: Mapping[str, Reason]
) -> Reason:
    """The reason why an operation of a low-precision module is not in low precision. known: reasons found so far.

    A decision of autocast or of the author names no operation, so that repeated blocks share one reason.
    """
    node, setting, kernel = problem.capture.nodes[n.name], how.setting(n.name), resolution.nodes[n.name].kernel
    given, inside = label(kernel), setting.in_region(node.region)
    if node.dtype in ("float64", "complex64", "complex128"):
        return Reason("author", f"the model's code computes in {node.dtype}, which no plan lowers")
    if setting.autocast and not inside.autocast:
        return Reason("author", "the model's code switches autocast off there")
    if inside.precision != setting.precision or any(isinstance(x, torch.dtype) for x in (*n.args, *n.kwargs.values())):
        return Reason("author", f"the model's code requests {given}")
    if how.casts(node).autocast in ("fp32", "fp32_unless_dtype"):
        runner = problem.strategy if problem.how.regional else "the surrounding autocast region"
        return Reason("strategy", f"{runner} always runs {operation(node.op).packet or node.op} in FP32")
    source = next((source for source in node.inputs if resolution.dtypes.get(source) == kernel), None)
    if source is None:
        return Reason("author", f"the model's code creates values in {given}")
    if (before := known.get(source)) is not None and before.kind == "inherited":
        return before
    if before is not None:
        op = problem.capture.nodes[source].op
        return Reason("inherited", f"reads {given} from {operation(op).packet or op}, since {before.words}")
    place = next((p for p in problem.capture.placeholders if p.name == source), None)
    if place is None:
        return Reason("inherited", f"reads {given} from {source}", by=source)
    name = f" {(place.fqn or source).rpartition('.')[2]}" if place.kind != "constant" or place.fqn else ""
    return Reason("inherited", f"reads {given} from the {place.kind}{name}")
