"""The search space of plans over modules: proposes choices of precisions by minimum cuts, improves a choice by replays,
and explains why modules and operations stay in FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

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
        self.problem = problem
        self.budget = budget
        self.what = what
        self._replayed = run
        self.nothing = problem.evaluate(problem.energy.scopes)
        self.low = problem.evaluate(())
        self.least = problem.least
        self.left = REPLAYS

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
        wide = problem.evaluate(low.high | outputs_in(problem.products, owner))
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
    problem = space.problem
    chosen = as_candidate(problem, plan)
    explainer = Explainer(space, chosen)
    least_high = explainer.lower_idle()
    explainer.replay_doubtful()
    reasons = [explainer.reason_of(owner, findings) for owner in explainer.lowered]
    forced = [owner for owner in _fp32_owners(problem, least_high) if _has_floats(problem, owner)]
    return replace(
        plan,
        reasons=(*merge_alike(reasons), *operation_reasons(problem, chosen)),
        least=tuple(dict.fromkeys(map(module_of, forced))),
    )


class Effect(NamedTuple):
    """The effect of low precision in one FP32 owner of a plan. before, after: error of the plan without and with it; ran:
    whether `after` is measured by a replay; adds: after - before, None if not finite; left: the part of the error budget
    that the plan leaves; saves: share of the plan's cost; failure: what a run of the model raised."""

    before: float
    after: float
    ran: bool
    adds: float | None
    left: float
    saves: float
    failure: str

    @property
    def raises_error(self) -> bool:
        """Whether low precision raises the output error by an amount that texts show."""
        return not (self.after <= self.before or f"{self.after:.3g}" == f"{self.before:.3g}")


class Explainer:
    """Explains why owners (modules, functions, FP32 outputs of matrix products) are FP32 in one choice of precisions.

    lowered: {FP32 owner: the choice with this owner in low precision}. forbidden: {FP32 owner: why it cannot run in low
    precision, or None}. saves: {FP32 owner: share of the choice's cost that low precision would save}. idle: owners that
    could run in low precision, but whose low precision does not reduce the price. harmless: whether the budget is met
    with all idle owners in low precision, as far as `lower_idle` knows.
    """

    def __init__(self, space: Modules, chosen: Candidate) -> None:
        problem = space.problem
        self.space = space
        self.problem = problem
        self.chosen = chosen
        self.outputs = sorted(path for path in chosen.high if path.endswith(FP32_OUTPUT))
        owners = (*_fp32_owners(problem, chosen), *self.outputs)
        self.lowered = {owner: _lower(problem, chosen, [owner]) for owner in owners}
        self.forbidden = {
            owner: _find_prohibition(space, point, chosen, owner) for owner, point in self.lowered.items()
        }
        self.saves = {owner: self._share_saved(point) for owner, point in self.lowered.items()}
        self.possible = [owner for owner, why in self.forbidden.items() if why is None or why.kind == "not-floating"]
        self.idle = [owner for owner in self.possible if self.lowered[owner].price >= chosen.price]
        self.harmless = False

    def _share_saved(self, point: Candidate) -> float:
        if not self.chosen.cost:
            return 0.0
        return max(1 - point.cost / self.chosen.cost, 0.0)

    def lower_idle(self) -> Candidate:
        """The choice with all idle owners in low precision, if replays show that it meets the budget; otherwise with the
        first one that meets the budget alone; otherwise the choice itself. Sets `harmless`."""
        space = self.space
        chosen = self.chosen
        all_low = _lower(self.problem, chosen, self.idle)
        self.harmless = all_low == chosen or space.holds(chosen, all_low, space.budget)
        if self.harmless:
            return all_low
        single = (self.lowered[owner] for owner in self.idle)
        return next((point for point in single if space.holds(chosen, point, space.budget)), chosen)

    def replay_doubtful(self) -> None:
        """Replay the owners whose predicted errors are too near the budget to tell on which side of it they are."""
        # keyed by choice, since owners that share a weight have the same one
        doubts = dict[frozenset[str], tuple[float, Candidate]]()
        for owner in self.possible:
            if self.harmless and owner in self.idle:
                continue  # explained by the price alone
            point = self.lowered[owner]
            doubts[point.high] = (self.space.doubt(self.chosen, point), point)
        near = [(doubt, point) for doubt, point in doubts.values() if doubt <= NEAR]
        near.sort(key=lambda pair: pair[0])
        for _, point in near[:DECIDING]:
            self.space.error(point)

    def reason_of(self, owner: str, findings: Sequence[Finding]) -> Reason:
        """The reason why an owner is FP32, with the rules of the findings at its operations."""
        reason = self.forbidden[owner] or self._explain(owner)
        words = _about_output(reason.words) if owner in self.outputs else reason.words
        operations = [node.name for node in _operations(self.problem, owner)]
        rules = () if reason.kind == "no-gain" else self._rules_at(operations, findings)
        reason = replace(reason, words=words, saves=self.saves[owner], rules=rules)
        if owner == module_of(owner):
            return replace(reason, modules=(owner,))
        twins = self.problem.capture.twins
        return replace(reason, functions=(owner,), operations=tuple(name for name in operations if name not in twins))

    def _rules_at(self, operations: Sequence[str], findings: Sequence[Finding]) -> tuple[str, ...]:
        """Rules of the findings, above level info, at those of the operations that are not safe."""
        harmful = {name for name in operations if self.problem.verdicts[name].verdict != "safe"}
        rules = set[str]()
        for finding in findings:
            applies = self.problem.format in finding.formats and finding.severity != "info"
            if applies and finding.node in harmful:
                rules.add(finding.rule)
        return tuple(sorted(rules))

    def _effect_of(self, owner: str) -> Effect:
        """The effect of low precision in an owner, from a replay if there was one and the reason depends on it."""
        space = self.space
        point = self.lowered[owner]
        before = space.before(self.chosen)
        explained_by_price = owner in self.idle and self.harmless
        ran = point.high in space.log and not explained_by_price
        after = space.error(point) if ran else space.after(self.chosen, point)
        return Effect(
            before=before,
            after=after,
            ran=ran,
            adds=after - before if math.isfinite(after) else None,
            left=max(space.budget - before, 0.0),
            saves=self.saves[owner],
            failure=space.failures.get(point.high, ""),
        )

    def _explain(self, owner: str) -> Reason:
        """The reason why an owner that could run in low precision does not."""
        effect = self._effect_of(owner)
        if owner in self.idle and (self.harmless or effect.after <= self.space.budget):
            return self._explain_idle(effect)
        return explain_effect(self.space, effect)

    def _explain_idle(self, effect: Effect) -> Reason:
        """The reason if low precision would save too little; all idle owners that save anything share one text."""
        largest = max(self.saves[owner] for owner in self.idle)
        gain = _too_small(largest if effect.saves else 0.0, self.problem.objective)
        only = "" if self.harmless else "only "
        return Reason("no-gain", f"low precision {only}there {gain}", adds=effect.adds, left=effect.left)


def explain_effect(space: Modules, effect: Effect) -> Reason:
    """The reason why an owner is FP32 whose low precision would reduce the price or exceed the budget."""
    if effect.raises_error:
        return _explain_increase(space, effect)
    return _explain_unchanged(space, effect)


def _explain_increase(space: Modules, effect: Effect) -> Reason:
    """The reason if low precision raises the error."""
    verb = "increases" if effect.ran else "is predicted to increase"
    words = explain_budget(
        effect.before,
        effect.after,
        space.budget,
        effect.saves,
        space.problem.objective,
        raises=f"{verb} the {space.what}",
        failure=effect.failure,
    )
    return _over_limit(space, effect, words)


def _explain_unchanged(space: Modules, effect: Effect) -> Reason:
    """The reason if low precision does not raise the error: it saves too little, or no run was left to verify it."""
    verb = "leaves" if effect.ran else "is predicted to leave"
    leaves = f"low precision there {verb} the {space.what} at {effect.after:.3g}"
    objective = space.problem.objective
    if effect.saves < WORTH:
        words = f"{leaves}, and {_too_small(effect.saves, objective)}"
        return Reason("no-gain", words, adds=effect.adds, left=effect.left)
    unverified = "" if effect.ran else "; the audit had no run left to verify this"
    words = f"{leaves}, and {explain_gain(effect.saves, objective)}{unverified}"
    return _over_limit(space, effect, words)


def _over_limit(space: Modules, effect: Effect, words: str) -> Reason:
    """The reason that the error would exceed the budget, or only the budget less its safety margin."""
    kind = "margin" if effect.after <= space.budget else "budget"
    return Reason(kind, words, adds=effect.adds, left=effect.left, ran=effect.ran)


def _about_output(words: str) -> str:
    """The words of a reason for an FP32 output: only the output would be in low precision."""
    output = "a low-precision output"
    return words.replace("in low precision", f"with {output}").replace("low precision", output)


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
    """The reason why an owner cannot run in low precision, or None. point: `chosen` with the owner lowered."""
    problem = space.problem
    if not _has_floats(problem, owner):
        content = "has no floating-point" if _operations(problem, owner) else "contains only submodules, no"
        return Reason("not-floating", f"{content} operations")
    if owner in point.high:
        return Reason("author", "the model's code switches autocast off there")
    if point.feasible:
        return None
    resolution = problem.resolve(choice_keeping(point.high, problem.format))
    broken = _newly_forbidden(problem, chosen, resolution)
    if not broken:
        return None
    own = {node.name for node in _operations(problem, owner)}
    group = lowered_with(problem, owner)
    nodes = problem.capture.nodes
    # the owner's own operations explain most, then those of the modules that share a weight with it
    nearest = max(broken, key=lambda name: (name in own, nodes[name].owner in group))
    return _explain_prohibition(space, point, resolution, owner, nearest)


def _newly_forbidden(problem: Problem, chosen: Candidate, lowered: Resolution) -> list[str]:
    """Operations that are forbidden under the dtypes `lowered`, but not under the choice `chosen`."""
    present = problem.resolve(choice_keeping(chosen.high, problem.format))
    forbidden = [name for name in problem.capture.nodes if problem.is_forbidden(lowered, name)]
    return [name for name in forbidden if not problem.is_forbidden(present, name)]


def _explain_prohibition(
    space: Modules, point: Candidate, resolution: Resolution, owner: str, forbidden: str
) -> Reason:
    """The reason why an owner cannot run in low precision: then the operation `forbidden` would break. point,
    resolution: the choice with the owner lowered, and its dtypes."""
    problem = space.problem
    is_own = forbidden in {node.name for node in _operations(problem, owner)}
    name = problem.capture.twins.get(forbidden, forbidden)
    module = problem.capture.nodes[forbidden].owner
    place = module or "the whole model"
    subject = name
    cause = name
    if not is_own and module != module_of(owner):
        subject = f"{name} in {place}"
        cause = module
    kind, failure = _failure_of(space, point, resolution, forbidden)
    words = f"{subject}{failure}"
    if is_own:
        return Reason(kind, words, by=name)
    if kind == "conflict" and owner in problem.forced_fp32 and owner != module_of(owner):
        return Reason(kind, f"its result is FP32 anyway; otherwise, {words}", by=name)
    if module in lowered_with(problem, owner):
        return Reason("tied", f"shares a weight with {place}, and {words}", by=module)
    return Reason("inherited", f"if it returned low precision: {words}", by=cause)


def _failure_of(space: Modules, point: Candidate, resolution: Resolution, forbidden: str) -> tuple[str, str]:
    """(kind of Reason, words that follow the operation's name): how a forbidden operation fails under a choice."""
    problem = space.problem
    verdict = problem.verdicts[forbidden]
    if forbidden not in resolution.conflicts or verdict.verdict in ("unsafe", "untested"):
        return verdict.verdict, f" is {verdict.verdict}, since {verdict.reason}"
    policy = problem.policy_for(choice_keeping(point.high, problem.format))
    line = _line_of(problem.capture.nodes[forbidden])
    return "conflict", f"{line} {_mixed_words(space, policy, resolution, forbidden)}"


def _line_of(node: Node) -> str:
    return f" ({node.source})" if node.source else ""


def _mixed_words(space: Modules, policy: Policy, resolution: Resolution, conflict: str) -> str:
    """What happens at an operation that gets two dtypes: what the run of the whole model in low precision raised there,
    otherwise what is predicted; and where the FP32 values were made."""
    origins = Describer(policy.capture).origins([find_mixtures(policy, resolution)[conflict]])
    wide = f"; the FP32 values come from {origins}" if origins else ""
    failure, line = space.failures.get(space.low.high, ""), policy.capture.nodes[conflict].source
    if line and failure.endswith(f"({line})"):
        return f"raises an error in a run of the whole model in {label(policy.format)}: {failure.removesuffix(f' ({line})')}{wide}"
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
    precision = choice_keeping(chosen.high, problem.format)
    policy = problem.policy_for(precision)
    resolution = problem.resolve(precision)
    result = list[Reason]()
    known = dict[str, Reason]()  # {operation: why it is not in low precision although its module is}
    for n in problem.capture.graph_module.graph.nodes:
        node = problem.capture.nodes.get(n.name)
        typed = resolution.nodes[n.name]
        if node is None or is_low(typed.factors or typed.kernel):
            continue
        if not node.floating and resolution.touches_low(n.name):
            continue
        setting = policy.setting(n.name)
        if not node.floating:
            reason = Reason("not-floating", "not a floating-point operation")
        elif setting.kept and node.function and problem.variable(n.name) not in chosen.high:
            function = node.function.path
            by = next(call.path for call in node.calls if function in precision.keep.get(call.path, ()))
            keeper = by or "the model"
            reason = Reason("inherited", f"{keeper} keeps every call of {function} in FP32", by=by)
        elif not setting.kept and setting.precision != "fp32":
            reason = _explain_operation(problem, resolution, policy, n, known)
            known[n.name] = reason
        else:
            continue  # the operation's function or module has a reason
        if n.name not in problem.capture.twins:
            result.append(replace(reason, operations=(n.name,)))
    return merge_alike(result)


def merge_alike(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Merge reasons that differ only in module, function, operation and numbers; the largest numbers are kept."""
    alike: dict[Reason, list[Reason]] = {}
    for reason in reasons:
        shared = Reason(reason.kind, reason.words, by=reason.by, rules=reason.rules)
        alike.setdefault(shared, []).append(reason)
    return tuple(map(_merge_reasons, alike.values()))


def _merge_reasons(reasons: Sequence[Reason]) -> Reason:
    modules = list[str]()
    operations = list[str]()
    functions = list[str]()
    for reason in reasons:
        modules += reason.modules
        operations += reason.operations
        functions += reason.functions
    added = [reason.adds for reason in reasons if reason.adds is not None]
    saved = [reason.saves for reason in reasons if reason.saves is not None]
    return replace(
        reasons[0],
        modules=tuple(modules),
        operations=tuple(operations),
        functions=tuple(functions),
        adds=max(added, default=None),
        saves=max(saved, default=None),
        ran=all(reason.ran for reason in reasons),
    )


def _explain_operation(
    problem: Problem, resolution: Resolution, policy: Policy, n: fx.Node, known: Mapping[str, Reason]
) -> Reason:
    """The reason why an operation of a low-precision module is not in low precision. known: reasons found so far.

    A decision of autocast or of the author names no operation, so that repeated blocks share one reason.
    """
    node = problem.capture.nodes[n.name]
    kernel = resolution.nodes[n.name].kernel
    wide = label(kernel)
    decided = _explain_decision(problem, policy, n, wide)
    if decided is not None:
        return decided
    source = next((source for source in node.inputs if resolution.dtypes.get(source) == kernel), None)
    if source is None:
        return Reason("author", f"the model's code creates values in {wide}")
    before = known.get(source)
    if before is not None:
        if before.kind == "inherited":
            return before
        op = problem.capture.nodes[source].op
        return Reason("inherited", f"reads {wide} from {operation(op).packet or op}, since {before.words}")
    place = next((place for place in problem.capture.placeholders if place.name == source), None)
    if place is None:
        return Reason("inherited", f"reads {wide} from {source}", by=source)
    words = f"reads {wide} from the {place.kind}"
    if place.kind != "constant" or place.fqn:
        name = (place.fqn or source).rpartition(".")[2]
        words += f" {name}"
    return Reason("inherited", words)


def _explain_decision(problem: Problem, policy: Policy, n: fx.Node, wide: str) -> Reason | None:
    """The decision of the author or of autocast that keeps an operation in `wide`; None if its inputs keep it there."""
    node = problem.capture.nodes[n.name]
    setting = policy.setting(n.name)
    inside = setting.in_region(node.region)
    if node.dtype in ("float64", "complex64", "complex128"):
        return Reason("author", f"the model's code computes in {node.dtype}, which no plan lowers")
    if setting.autocast and not inside.autocast:
        return Reason("author", "the model's code switches autocast off there")
    asks_dtype = any(isinstance(argument, torch.dtype) for argument in (*n.args, *n.kwargs.values()))
    if inside.precision != setting.precision or asks_dtype:
        return Reason("author", f"the model's code requests {wide}")
    if policy.casts(node).autocast in ("fp32", "fp32_unless_dtype"):
        runner = problem.strategy if problem.how.regional else "the surrounding autocast region"
        return Reason("strategy", f"{runner} always runs {operation(node.op).packet or node.op} in FP32")
    return None
