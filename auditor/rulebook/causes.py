"""Groups findings by root cause, locates the cause, and sets severities for the plan in use."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import networkx as nx

from ..artefact.strategies import SHIPPED
from ..execution.policy import Policy, choice_from_scopes, plain
from ..execution.resolve import is_low, resolve
from ..measure.calibrate import Calibration
from ..measure.causes import breaks
from ..numerics.formats import FORMATS, runs
from ..numerics.operations import operation
from ..numerics.schemes import SCHEMES
from ..records import Capture, Contribution, Finding, Node, Plan, Verdict
from ..records.ledger import SilentCast
from ..records.measure import FAILURES, Ignore
from ..records.paths import place_of
from ..records.quantization import QuantizedLayer
from .compiled import Recomputed
from .failures import Failed, judge_failures
from .findings import FLAGGED, apply_selection, classify, compare_with_verdicts, silent_findings, with_batches
from .gather import gather
from .inputs import LOSES, InputMagnitudes, input_findings, is_input_cast
from .rule import SEVERITIES, Rule
from .verdicts import Judgement

Verdicts = Mapping[str, Mapping[str, Verdict]]
APART = ("hardware", "collectives", "settings", "casts", "quantization", "dtypes", "runs", "compiled")
"""Rule families about speed, devices, compilers, dtypes or schemes, which do not explain errors on the same line."""
AMPLIFIED = 8.0
"""An operation amplifies errors if its inputs' errors change the outputs this many times as much as its result's
errors, for example a softmax of large entries."""

WEIGHTY = 0.25
"""An amplifying operation decides a group's cause if its effect is at least this share of the largest in the group."""


@dataclass(frozen=True)
class FlowGraph:
    """The nodes of a capture in execution order, with their measurements and verdicts. inputs: names of the model's
    inputs, which the nodes read. exposed: as in Judgement."""

    nodes: Mapping[str, Node]
    measured: Calibration
    verdicts: Verdicts
    inputs: frozenset[str] = frozenset()
    exposed: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def is_broken(self, name: str, *formats: str) -> bool:
        """Whether the node, alone in one of the formats, raises or turns its result or an output Inf or NaN."""
        errors, moved = self.measured.errors.get(name, {}), self.measured.contributions.get(name, {})
        return any(fmt in errors and breaks(errors[fmt], moved.get(fmt)) for fmt in formats)

    def overflowing_inputs(self, fmt: str) -> list[str]:
        """Inputs with values beyond the format's largest number."""
        ranges = self.measured.ranges
        return [name for name in self.inputs if name in ranges and ranges[name].max_abs > FORMATS[fmt].largest]

    def follows(self, name: str, source: str, fmt: str) -> bool:
        """Whether every strategy that runs the node in low precision also runs its source so: autocast may cast a value
        that an FP32 operation computed, and then the cast at the node is where the value overflows."""
        under, above = (self.exposed.get(each, {}).get(fmt) for each in (name, source))
        return under is None or above is None or {*under} <= {*above}

    def has_broken_result(self, name: str, fmt: str) -> bool:
        """Whether the node's own result has Inf or NaN in the format, or the node raises. An operation may also turn
        only an output Inf or NaN, by rounding."""
        error = self.measured.errors.get(name, {}).get(fmt)
        return error is not None and bool(error.overflow or error.nan or error.unsupported)

    def is_judged(self, name: str, formats: Collection[str], kinds: Collection[str] = FLAGGED) -> bool:
        """Whether the node has a verdict in `kinds` in one of the formats."""
        verdicts = self.verdicts.get(name, {})
        return any(fmt in verdicts and verdicts[fmt].verdict in kinds for fmt in formats)

    def contribution(self, name: str, fmt: str) -> Contribution:
        """Effect on the outputs of running only this node in the format; 0 if the effect was not measured."""
        return self.measured.contributions.get(name, {}).get(fmt, Contribution(0.0, 0.0, 0.0))


def findings_of(
    capture: Capture,
    measured: Calibration,
    judged: Judgement,
    *,
    rules: Sequence[Rule],
    formats: Collection[str],
    trains: bool,
    select: Sequence[str],
    ignores: Sequence[Ignore],
    casts: Sequence[SilentCast] = (),
    inputs: Sequence[InputMagnitudes] = (),
    failed: Failed = MappingProxyType({}),
    gradients: Recomputed = MappingProxyType({}),
) -> tuple[Finding, ...]:
    """Findings of the rules, compared with the measurement, each with its cause; precision findings on nodes that no
    strategy runs in low precision are dropped. formats, trains: as in `classify`; select, ignores: as in
    `apply_selection`; casts: unrequested casts; inputs: ranges of the model's inputs; failed: runs of the whole model in
    low precision that raised; gradients: those that a compiler changes, see `unrounded_gradients`."""
    graph = FlowGraph(capture.nodes, measured, judged.verdicts, input_names(capture), judged.exposed)
    by_node: dict[str, dict[str, QuantizedLayer]] = {name: {} for name in graph.verdicts}
    for layer in judged.layers:
        by_node[layer.node][layer.scheme] = layer
    verdicts = {}  # {node: {format or scheme: Verdict}}
    for name, by_format in graph.verdicts.items():
        by_scheme = {scheme: layer.verdict for scheme, layer in by_node[name].items()}
        verdicts[name] = {**by_format, **by_scheme}
    schemes = {layer.scheme for layer in judged.layers}
    apply_rules = partial(classify, rules=rules, formats={*formats, *schemes}, trains=trains)

    made = apply_rules(capture, gather(capture, measured.ranges, verdicts, by_node, gradients))
    result = tuple(one for one in made if not one.measurable or _runs_low(one, judged))
    first = set[tuple[str, str]]()  # (node, format) at which Inf or NaN begins
    for fmt in formats:
        for name, beginning in _beginnings(graph, fmt).items():
            if name == beginning and graph.has_broken_result(name, fmt):
                first.add((name, fmt))
    result = compare_with_verdicts(result, verdicts, first)
    result = judge_failures(result, failed, capture, rules)
    result += silent_findings(casts, capture, rules, formats)
    result += tuple(input_findings(inputs, capture, rules, formats, judged.verdicts))
    selected = apply_selection(result, select, ignores, rules)
    caused = with_causes(selected, graph, rules)

    # A finding that the first batch's measurements do not give gets the number of its batch.
    later = any(verdict.batch != 1 for by_format in graph.verdicts.values() for verdict in by_format.values())
    before = measured.first if later else None
    shown = frozenset[tuple[str, str]]()
    if before is not None:
        of_first = apply_rules(capture.first, gather(capture.first, before.ranges, gradients=gradients))
        shown = frozenset((one.rule, one.node) for one in of_first)
    return with_batches(caused, capture, graph.verdicts, shown)


def _runs_low(finding: Finding, judged: Judgement) -> bool:
    """Whether a strategy runs the finding's node in low precision, in one of the finding's formats."""
    exposed = judged.exposed.get(finding.node, {})
    return any(exposed.get(fmt, True) for fmt in finding.formats)


def with_causes(findings: Sequence[Finding], graph: FlowGraph, rules: Sequence[Rule]) -> tuple[Finding, ...]:
    """Add to each finding the line and operation where its problem begins; findings with the same origin share a cause.

    Repeated blocks share a line, and thus a cause. The operation that produces Inf or NaN is the cause for its readers.
    An MSR finding (of the measurement alone) gets the cause of the nearest confirmed finding of a precision rule, if
    sensitive or unsafe operations connect the two. Other connected findings, or findings on one line, share a cause.
    """
    families = {rule.code: rule.family for rule in rules}
    formats = dict.fromkeys(fmt for finding in findings for fmt in finding.formats)
    beginnings = {fmt: _beginnings(graph, fmt) for fmt in formats}
    breaking = {id(finding) for finding in findings if graph.is_broken(finding.node, *finding.formats)}

    causes = dict[int, str]()  # {id of a finding: its cause}
    nearby = dict[str, str]()  # {node: cause of a confirmed finding of a precision rule}
    for finding in findings:
        is_breaking = id(finding) in breaking
        if families.get(finding.rule) == "measured" and not is_breaking:
            continue
        causes[id(finding)] = _place(graph, finding, beginnings, families)
        is_confirmed = finding.agrees and finding.severity != "info" and finding.measurable
        if is_confirmed and not is_breaking:
            nearby[finding.node] = causes[id(finding)]

    of_measurement = [finding for finding in findings if id(finding) not in causes]
    broken = {causes[finding] for finding in breaking}
    causes |= _causes_of_measurement(graph, of_measurement, nearby, beginnings, broken)
    return tuple(replace(finding, cause=causes[id(finding)]) for finding in findings)


def _beginnings(graph: FlowGraph, fmt: str) -> dict[str, str]:
    """{broken node (see is_broken): the first broken node or overflowing input upstream of it}; a node that raises is its
    own cause."""
    overflowing = graph.overflowing_inputs(fmt) if fmt in FORMATS else []
    result = {name: name for name in overflowing}
    for name, node in graph.nodes.items():
        if graph.is_broken(name, fmt):
            raises = graph.measured.errors[name][fmt].unsupported
            sources = [source for source in node.inputs if source in result and graph.follows(name, source, fmt)]
            result[name] = name if raises or not sources else result[sources[0]]
    return result


def _place(
    graph: FlowGraph, finding: Finding, begins: Mapping[str, Mapping[str, str]], families: Mapping[str, str]
) -> str:
    if finding.node in graph.inputs:
        place = f"input {finding.node}"
        return f"{place}: {finding.rule}" if finding.rule == LOSES else place  # which no Inf or NaN follows
    if finding.node not in graph.nodes:
        return finding.source or finding.op
    if families.get(finding.rule) in APART:
        return f"{place_of(graph.nodes[finding.node])}: {finding.rule}"
    origins = (begins[fmt].get(finding.node) for fmt in finding.formats if not _is_about_buffers(finding))
    origin = next(filter(None, origins), finding.node)
    return f"input {origin}" if origin in graph.inputs else place_of(graph.nodes[origin])


def _is_about_buffers(finding: Finding) -> bool:
    """Whether a finding is about stored statistics, which no value that the operation reads changes."""
    return "buffer_max_abs" in finding.evidence


def _causes_of_measurement(
    graph: FlowGraph,
    findings: Sequence[Finding],
    foreseen: Mapping[str, str],
    formats: Iterable[str],
    broken: Container[str],
) -> dict[int, str]:
    """Causes of precision findings that no rule explains: the cause of the nearest connected node with a cause; in a
    tie, of the node that runs first. Other connected findings share a cause, see `_head`.

    foreseen: {node: its cause}; broken: causes of Inf or NaN, from which a precision cause at the same place is kept
    separate.
    """
    result: dict[int, str] = {}
    together = nx.Graph()  # places that findings without a rule's cause share
    for fmt in formats:
        flagged = {name: node for name, node in graph.nodes.items() if graph.is_judged(name, (fmt,))}
        inputs = {name: [source for source in node.inputs if source in flagged] for name, node in flagged.items()}
        connected = nx.Graph(inputs)
        for joined in nx.connected_components(connected):
            nx.add_path(together, (place_of(flagged[name]) for name in joined))

        # A search from all nodes with a cause at once reaches every other node from its nearest.
        nearest = {name: cause for name, cause in foreseen.items() if name in flagged}
        connected.add_edges_from(("", name) for name in nearest)
        for above, name in nx.bfs_edges(connected, "") if nearest else ():
            nearest.setdefault(name, nearest.get(above, ""))
        for finding in findings:
            if fmt in finding.formats and finding.node in nearest:
                result[id(finding)] = nearest[finding.node]

    places = {id(f): place_of(graph.nodes[f.node]) for f in findings if id(f) not in result}
    together.add_nodes_from(places.values())
    for joined in nx.connected_components(together):
        members = [finding for finding in findings if places.get(id(finding)) in joined]
        if not members:
            continue
        head = place_of(graph.nodes[_head(graph, members)])
        cause = f"{head}: precision" if head in broken else head
        result |= dict.fromkeys(map(id, members), cause)
    return result


def _head(graph: FlowGraph, findings: Sequence[Finding]) -> str:
    """The operation where the errors begin that change the outputs: the operation whose result another operation
    amplifies.

    All operations before an amplifying operation change the outputs about equally, so effects do not show which of them
    causes the error. Without an amplifying operation, the result is the operation that changes the outputs most; not a
    move such as a transpose, if an operation that computes has a finding.
    """
    contributions = {(f.node, fmt): graph.contribution(f.node, fmt) for f in findings for fmt in f.formats}
    effects = {f.node: max(contributions[f.node, fmt].isolated for fmt in f.formats) for f in findings}
    computing = [name for name in effects if not operation(graph.nodes[name].op).transparent]
    strongest = max(computing or effects, key=effects.__getitem__)

    amplifiers = list[tuple[str, str]]()
    for place, contribution in contributions.items():
        rounding = max(contribution.own, contribution.cast)
        if 0 < AMPLIFIED * rounding < contribution.isolated < math.inf:
            amplifiers.append(place)
    if not amplifiers:
        return strongest
    amplifier, fmt = max(amplifiers, key=lambda place: effects[place[0]])
    if effects[amplifier] < WEIGHTY * effects[strongest]:
        return strongest
    return _maker(graph, amplifier, fmt, effects)


def _maker(graph: FlowGraph, amplifier: str, fmt: str, among: Container[str]) -> str:
    """Follow the amplifier's only inaccurate input upstream, through moves, masks and sums, to the operation that
    computes it. Return the furthest of these operations with a finding; if none has one, the amplifier."""
    name = result = amplifier
    while True:
        sources = [source for source in dict.fromkeys(graph.nodes[name].inputs) if graph.is_judged(source, (fmt,))]
        if len(sources) != 1 or sources[0] not in graph.nodes:
            return result
        (name,) = sources
        result = name if name in among else result
        row = operation(graph.nodes[name].op)
        if not (row.transparent or row.exact or row.masks or row.sum):
            return result


@dataclass(frozen=True)
class _Uses:
    """Nodes that use low-precision values in a run. computing: nodes that compute in low precision; reading: nodes with
    a low-precision input, even if that input is cast to FP32."""

    computing: frozenset[str]
    reading: frozenset[str]

    @classmethod
    def of(cls, capture: Capture, strategy: str, precision_of: Callable[[str], str], format: str) -> _Uses:
        """_Uses for a strategy whose scopes have the precisions `precision_of`."""
        policy = Policy(capture, strategy, precision_of, format)
        result = resolve(policy)
        computing = {name for name in input_names(capture) if is_input_cast(policy, name)}
        reading = {*result.reads_low}
        for name, node in capture.nodes.items():
            computed = result.computed_format(name)
            is_discrete = not computed  # then the operation is in low precision if its inputs are
            if result.low(name) or is_low(computed) or (is_discrete and name in result.reads_low):
                computing.add(name)
            if any(result.low(source) for source in node.inputs):
                reading.add(name)
        return cls(frozenset(computing), frozenset(reading))

    @classmethod
    def by_operation(cls, capture: Capture, kept: Collection[str]) -> _Uses:
        """_Uses for an exported program: all floating-point operations are in low precision, except for `kept`."""
        floating = {name for name, node in capture.nodes.items() if node.floating}
        floating.update(place.name for place in capture.placeholders)
        computing = set[str]()
        for name, node in capture.nodes.items():
            if node.floating or floating.intersection(node.inputs):
                computing.add(name)
        computing -= set(kept)
        reading = {name for name, node in capture.nodes.items() if computing.intersection(node.inputs)}
        return cls(frozenset(computing), frozenset(reading))


def about(
    findings: Sequence[Finding],
    plans: Mapping[str, Plan],
    recommended: str | None,
    capture: Capture,
    graph: FlowGraph,
    strategies: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Set each finding's severity for the recommended plan; without one, for the fastest plan within the error budget.

    If such a plan exists, findings on operations that it keeps in FP32, or that fail only under other plans, are at
    most warnings. Other findings become one level less severe. Exceptions: findings on no operation, on quantization,
    untestable findings on operations that the plan runs in low precision, and findings on runs that raised in the
    plan's format. strategies: the requested ones, by default all; a finding that only occurs under others is a note.
    """
    findings = _with_strategies(findings, capture, graph)
    holding = [plan for plan in plans.values() if plan.holds and plan.has_low]
    live = [plan for plan in holding if plan.program is None]
    fastest = max(live or holding, key=lambda plan: plan.predicted_speedup, default=None)
    plan = plans[recommended] if recommended else fastest
    if plan is None:
        return _rate_without_plan(findings, plans, graph)
    if plan.program is not None:
        kept = {operation.node for operation in plan.program.kept if operation.node}
        under = _Uses.by_operation(capture, kept)
        plainly = _Uses.by_operation(capture, ())
    else:
        under = _Uses.of(capture, plan.strategy, choice_from_scopes(plan.scopes), plan.format)
        plainly = _Uses.of(capture, plan.strategy, plain(plan.format), plan.format)
    rated = [_with_severity(finding, plan, under, plainly, graph) for finding in findings]
    return tuple(_note_elsewhere(finding, strategies) for finding in rated)


def _rate_without_plan(findings: Sequence[Finding], plans: Mapping[str, Plan], graph: FlowGraph) -> tuple[Finding, ...]:
    """The findings, with the bearing `stops` for those on unsafe operations, if a plan's format could run."""
    could_run = any(runs(plan.format) for plan in plans.values())
    rated = list[Finding]()
    for finding in findings:
        stops = could_run and graph.is_judged(finding.node, finding.formats, ("unsafe",))
        rated.append(replace(finding, bearing="stops" if stops else None))
    return tuple(rated)


def _note_elsewhere(finding: Finding, strategies: Collection[str]) -> Finding:
    """The finding, as a note if it only occurs under strategies other than the requested ones."""
    met = {strategy for under in finding.met.values() for strategy in under}
    return replace(finding, severity="info") if met and strategies and met.isdisjoint(strategies) else finding


def input_names(capture: Capture) -> frozenset[str]:
    """Names of the model's inputs in the graph."""
    return frozenset(place.name for place in capture.placeholders if place.kind == "input")


def _with_strategies(findings: Sequence[Finding], capture: Capture, graph: FlowGraph) -> tuple[Finding, ...]:
    """Add to each finding the strategies that run its operation in low precision if the plan keeps nothing in FP32."""
    formats = {fmt for verdicts in graph.verdicts.values() for fmt in verdicts}
    named = dict.fromkeys(fmt for finding in findings for fmt in finding.formats if fmt in formats)
    low = {fmt: {name: _Uses.of(capture, name, plain(fmt), fmt).computing for name in SHIPPED} for fmt in named}

    def with_strategies(finding: Finding) -> Finding:
        if finding.rule.startswith(FAILURES):  # names the runs that raised already
            return finding
        met = dict[str, tuple[str, ...]]()
        for fmt in finding.formats:
            strategies = tuple(name for name, computing in low.get(fmt, {}).items() if finding.node in computing)
            if strategies:
                met[fmt] = strategies
        return replace(finding, met=met)

    return tuple(map(with_strategies, findings))


def _relation(finding: Finding, plan: Plan, under: _Uses, plainly: _Uses, graph: FlowGraph) -> str | None:
    if not finding.node or SCHEMES.keys() >= {*finding.formats}:
        return None
    if plan.format not in finding.formats:
        return "elsewhere"
    if finding.rule.startswith(FAILURES) and plan.strategy not in finding.met.get(plan.format, ()):
        return "elsewhere"
    if finding.node in under.computing:
        return "low"
    if finding.node in plainly.computing:
        return "kept"
    if finding.node in under.reading:  # in FP32 the operation does not raise, and finite values stay finite
        return "elsewhere" if graph.is_broken(finding.node, plan.format) else "reads"
    return "kept" if finding.node in plainly.reading else "elsewhere"


def _with_severity(finding: Finding, plan: Plan, under: _Uses, plainly: _Uses, graph: FlowGraph) -> Finding:
    bearing = _relation(finding, plan, under, plainly, graph)
    rated = replace(finding, plan=plan.name, bearing=bearing)
    if finding.rule.startswith(FAILURES):
        most = "error" if plan.format in finding.met else "warning"
        return replace(rated, severity=min(finding.severity, most, key=SEVERITIES.index))
    if bearing is None or (bearing == "low" and not finding.measurable):
        return rated
    unsafe = graph.is_judged(finding.node, finding.formats, ("unsafe",))
    if bearing == "kept" or (bearing == "elsewhere" and unsafe and graph.is_broken(finding.node, *finding.formats)):
        return replace(rated, severity=min(finding.severity, "warning", key=SEVERITIES.index))
    return replace(rated, severity=SEVERITIES[max(SEVERITIES.index(finding.severity) - 1, 0)])
