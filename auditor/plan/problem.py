"""The optimization problem of one plan: prices, errors and prohibitions of running scopes low, each rounding counted
once; dtype conflicts between low scopes; functions that low modules may keep in FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from ..artefact.base import Strategy
from ..artefact.strategies import strategy_of
from ..capture.paths import reach
from ..execution.policy import Layout, Policy, choice_keeping, plain
from ..execution.resolve import NodeType, Resolution, Resolver, is_low, kept_low
from ..numerics.formats import FORMATS
from ..numerics.operations import operation
from ..paths import function_in, of_function
from ..records import Capture, Contribution, MemoryUse, Node, Verdict
from .costs import TIE, Cost, elements_of, memory_of, price, seconds, traffic_seconds
from .energy import energy_of, timed_in
from .mincut import FORBIDDEN, Candidate
from .outputs import cost_of, fails_by_inputs, products_of

ISLAND_SHARE = 0.003
"""Share of the FP32 price that one more scope must save: of plans with similar cost, fewer scopes are better."""


@dataclass(frozen=True)
class Lowest:
    """The lowest choice without dtype conflicts. raised: modules and functions that are FP32 to avoid a conflict."""

    resolution: Resolution
    raised: frozenset[str]


def find_lowest(problem: Problem) -> Lowest:
    """The lowest choice without dtype conflicts: operations that would get two dtypes raise an error.

    Three choices are compared. Each raises to FP32 the modules that make a conflict's FP32 values, or one function, or
    the module where the conflict is. The lowest price wins, then the fewest in FP32.
    """

    def rank(found: Lowest) -> tuple[bool, float, int]:
        price = sum(problem.node_price(name, found.resolution) for name in problem.capture.nodes)
        return bool(found.resolution.conflicts), price, len(found.raised)

    return min(
        (_without_conflicts(problem, blamed) for blamed in (_makers, _function, lambda *_: set[str]())), key=rank
    )


def _without_conflicts(problem: Problem, blamed: Callable[[Problem, Resolution, str], set[str]]) -> Lowest:
    """Raise modules or functions to FP32 until no conflict is left. blamed: what to raise for one node's conflict; if
    that is nothing new, the node's module is raised."""
    raised, nodes = set[str](), problem.capture.nodes
    while True:
        resolution = problem.resolve(choice_keeping(raised, problem.format))
        firsts = _first_conflicts(problem, resolution)
        wanted = {
            p for name in firsts for p in blamed(problem, resolution, name) - raised or {nodes[name].owner} - raised
        }
        if not wanted:
            return Lowest(resolution, frozenset(raised))
        raised |= wanted


def _first_conflicts(problem: Problem, resolution: Resolution) -> list[str]:
    """Conflicts without another conflict upstream: later ones may be its consequences."""
    behind, result = set[str](), []
    for name, node in problem.capture.nodes.items() if resolution.conflicts else ():
        tainted = any(source in behind for source in node.inputs)
        if name in resolution.conflicts and not tainted:
            result.append(name)
        if tainted or name in resolution.conflicts:
            behind.add(name)
    return result


def _makers(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """Modules in which the FP32 values of a conflict originate."""
    nodes, chain = problem.capture.nodes, _chain(problem, resolution, name)
    return {nodes[each].owner for each in chain if not any(before in chain for before in nodes[each].inputs)}


def _function(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """A torch function that makes the FP32 input of a conflict, in the innermost module call around the node with one.

    A scope that keeps a function in FP32 casts the inputs of its products to low precision; others do not.
    """
    nodes, chain = problem.capture.nodes, _chain(problem, resolution, name)
    giving = [each for each in nodes if each in chain and _entry(problem, each) and not problem.how.regional]
    for call in reversed(nodes[name].calls):
        if (first := next((each for each in giving if nodes[each].owner == call.path), None)) is not None:
            return {function_in(call.path, _entry(problem, first))}
    return set()


def _entry(problem: Problem, name: str) -> str:
    """The function of a node, as `keep` names it; "" if the node has none, or is a cast."""
    node = problem.capture.nodes[name]
    return "" if node.function is None or operation(node.op).cast else node.function.path


def _chain(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """Operations that make the FP32 inputs of a node in a low scope, directly or through other operations."""
    nodes = problem.capture.nodes

    def wide_inputs(each: str) -> list[str]:
        return [source for source in nodes[each].inputs if source in nodes and resolution.dtypes.get(source) == "fp32"]

    return set(reach(wide_inputs(name), wide_inputs))


def find_exceptions(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{module: functions that it may keep in FP32}, if products directly in its forward are worth running low.

    A module needs a product that is safe. A sensitive product is enough if another function is unsafe or untested.
    """
    products, functions = dict[tuple[str, str], set[str]](), dict[tuple[str, str], set[str]]()  # by module and verdict
    casts = dict[
        str, set[str]
    ]()  # casts to dtypes that Python code reads from tensors: FP32 arguments would change them
    for name, node in problem.capture.nodes.items():
        known, path = problem.verdicts.get(name), node.function.path if node.function else ""
        lowered = name not in problem.kept_formats and problem.lowest.resolution.touches_low(name)
        place = node.owner, known.verdict if known is not None and lowered else "safe"  # otherwise no plan lowers it
        if problem.costs[name].flops and operation(node.op).product:
            products.setdefault(place, set()).add(path)
        if node.function and operation(node.op).cast and problem.format in problem.how.literals(node):
            casts.setdefault(node.owner, set()).add(path)
        elif node.function:
            functions.setdefault(place, set()).add(path)
    result = dict[str, frozenset[str]]()
    able = dict.fromkeys(owner for owner, verdict in products if verdict in ("safe", "sensitive"))
    never = set().union(*(casts.get(owner, ()) for owner in able))
    for owner in able:
        safe, dear = (products.get((owner, verdict), set()) for verdict in ("safe", "sensitive"))
        unsafe = set().union(*(functions.get((owner, verdict), ()) for verdict in ("unsafe", "untested")))
        kept = unsafe | functions.get((owner, "sensitive"), set())
        if safe - kept or (unsafe and (safe | dear) - unsafe):
            result[owner] = frozenset(kept - never)
    for path in problem.lowest.raised:
        if (function := of_function(path)) is not None:
            result[function[0]] = result.get(function[0], frozenset()) | {function[1]}
    return {owner: names for owner, names in result.items() if names}


@dataclass(frozen=True)
class Terms:
    """What each node and placeholder adds to a choice: seconds of its kernel, price under the objective, FLOPs in low
    precision, elements of its result that are cast, and squared error, including that of rounding its result."""

    seconds: dict[str, float] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)
    low_flops: dict[str, int] = field(default_factory=dict)
    casts: dict[str, int] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """The recorded graph with its costs and errors, under one strategy and format.

    contributions: {format: {node or placeholder: Contribution}} of all measured formats. verdicts: per node, in the
    format that the node computes in if everything is in low precision. device: a row of devices.toml. raised,
    stored_low: see Subject.
    objective: what the plan minimizes: `time`, `memory`, or `flops` in FP32. All prices are in seconds: bytes and FLOPs
    count as the time that they take at the device's peak rates.
    """

    capture: Capture
    costs: Mapping[str, Cost]
    contributions: Mapping[str, Mapping[str, Contribution]]
    verdicts: Mapping[str, Verdict]
    strategy: str
    format: str
    device: str
    raised: str = "none"
    stored_low: Mapping[str, int] = field(default_factory=dict)
    objective: str = "time"
    evaluated: dict[frozenset[str], Candidate] = field(default_factory=dict, init=False, repr=False, compare=False)
    """{owners in FP32: Candidate}, the cache of `evaluate`."""
    _resolved: dict[str, NodeType] = field(default_factory=dict, init=False, repr=False, compare=False)
    _terms: Terms = field(default_factory=Terms, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name of the plan, such as `autocast_bf16`."""
        return f"{self.strategy}_{self.format}"

    @property
    def how(self) -> Strategy:
        """Definition of the strategy."""
        return strategy_of(self.strategy)

    @cached_property
    def elements(self) -> Mapping[str, int]:
        """{node or placeholder: number of floating-point elements in its result}."""
        return {node.name: elements_of(node) for node in self.capture.graph_module.graph.nodes}

    @cached_property
    def operations_of(self) -> Mapping[str, Sequence[Node]]:
        """{owner: operations directly in it}."""
        result: dict[str, list[Node]] = {}
        for node in self.capture.nodes.values():
            result.setdefault(node.owner, []).append(node)
        return result

    @cached_property
    def flops(self) -> int:
        """FLOPs of one forward."""
        return sum(cost.flops for cost in self.costs.values())

    @cached_property
    def paths(self) -> Sequence[Sequence[str]]:
        """For each path through the model, the names of its nodes and placeholders."""
        captures = [path.capture for path in self.capture.paths] or [self.capture]
        names = [n.name for n in self.capture.graph_module.graph.nodes]
        apart = dict.fromkeys(frozenset((*c.nodes, *(place.name for place in c.placeholders))) for c in captures)
        return [[name for name in names if name in path] for path in apart]

    energy = cached_property(energy_of)
    lowest = cached_property(find_lowest)
    exceptions = cached_property(find_exceptions)
    products = cached_property(products_of)

    def variable(self, name: str) -> str:
        """Name of what decides a node's precision: its module, or a function in it (see paths.function_in)."""
        node = self.capture.nodes[name]
        if node.function is None or node.function.path not in self.exceptions.get(node.owner, ()):
            return node.owner
        return function_in(node.owner, node.function.path)

    @cached_property
    def _resolver(self) -> Resolver:
        return Resolver(self.capture)

    @cached_property
    def island(self) -> float:
        """Seconds that one more scope in the plan must save."""
        raised = self.resolve(plain("fp32"))
        return ISLAND_SHARE * sum(self.node_price(name, raised) for name in self.capture.nodes)

    def node_price(self, name: str, resolution: Resolution) -> float:
        """Price of one node under the objective, in seconds."""
        cost, fmt = cost_of(self, name, resolution), timed_in(resolution, name)
        return price(self.objective, cost, self.elements[name], fmt, self.device)

    @property
    def byte_price(self) -> float:
        """Price of one byte of stored weights, in seconds; 0 for strategies that only count time."""
        return traffic_seconds(1, self.device) if self.objective == "memory" else self.how.seconds_per_byte

    def whole_price(self, resolution: Resolution, terms: Terms, casts: float) -> float:
        """Price of a choice, without that of its scopes. casts: seconds of its casts."""
        if self.objective == "memory":
            needed = self.memory(resolution)
            return traffic_seconds(needed.weights + needed.activations, self.device) + TIE * (
                sum(terms.seconds.values()) + casts
            )
        return sum(terms.prices.values()) + (casts if self.objective == "time" else 0.0)

    def terms(self, resolution: Resolution) -> Terms:
        """The terms of all nodes and placeholders, computed again only where dtypes differ from the previous call's."""
        stale = dict[fx.Node, None]()
        for n in self.capture.graph_module.graph.nodes:
            if self._resolved.get(n.name) is not resolution.nodes[n.name]:
                stale |= dict.fromkeys((n, *n.all_input_nodes))
        for n in stale:
            self._update_terms(resolution, n)
        self._resolved.update(resolution.nodes)
        return self._terms

    def _update_terms(self, resolution: Resolution, n: fx.Node) -> None:
        name, terms, readers = n.name, self._terms, [resolution.nodes[user.name] for user in n.users]
        rounded = any(name in typed.rounded for typed in readers) or (n.op == "placeholder" and resolution.low(name))
        measured = rounded and self.contribution(name, self.format) is not None
        terms.squares[name] = self.cast_square(resolution, name) if measured else 0.0
        if name not in self.costs:
            stored = self.format if resolution.low(name) else "fp32"
            terms.prices[name] = self.stored_price(name, stored) if name in self._priced else 0.0
            return
        cost, fmt = cost_of(self, name, resolution), timed_in(resolution, name)
        terms.seconds[name] = seconds(cost, fmt, self.device)
        terms.prices[name] = self.node_price(name, resolution)
        terms.low_flops[name] = cost.flops if is_low(fmt) else 0
        terms.casts[name] = self.elements[name] if any(name in typed.cast for typed in readers) else 0
        terms.squares[name] += self.node_square(resolution, name)

    @cached_property
    def _priced(self) -> frozenset[str]:
        """Placeholders with a price of storage."""
        return frozenset(p.name for p in self.capture.placeholders if p.kind in self.how.stores - {"input"})

    def memory(self, resolution: Resolution) -> MemoryUse:
        """Memory that one forward needs."""
        return memory_of(self.capture, self.costs, resolution, self.format)

    def stored_price(self, name: str, precision: str) -> float:
        """Price of one weight that is stored in a precision."""
        return self.byte_price * self.elements[name] * FORMATS[precision].bytes

    def resolve(self, precision: Callable[[str], str]) -> Resolution:
        """Dtypes of all nodes if every owner has the precision that `precision` returns."""
        return self._resolver(self.policy_for(precision))

    def policy_for(self, precision: Callable[[str], str]) -> Policy:
        """The policy in which every owner has the precision that `precision` returns."""
        return Policy(self.capture, self.strategy, precision, self.format, self.layout)

    @cached_property
    def layout(self) -> Layout:
        """The part that all policies of this problem share."""
        return Layout(self.capture, self.how)

    @cached_property
    def kept_formats(self) -> Mapping[str, str]:
        """{node: the format in which the author runs it, whatever the plan}."""
        return kept_low(self.capture, (self.strategy,), self.format)

    def contribution(self, name: str, format: str) -> Contribution | None:
        """Measured contribution of a node or placeholder in a format; None if it was not measured."""
        return self.contributions.get(format, {}).get(name)

    def is_forbidden(self, resolution: Resolution, name: str) -> bool:
        """Whether the plan gives low values to an unsafe or untested node, or two dtypes to another node."""
        verdict = self.verdicts.get(name)
        if name in self.kept_formats or verdict is None or verdict.verdict not in ("unsafe", "untested"):
            return resolution.nodes[name].conflict
        if resolution.nodes[name].factors:  # the errors of its inputs count where these are rounded
            return verdict.verdict == "untested" or fails_by_inputs(self.contribution(name, self.format))
        return resolution.touches_low(name)

    def node_square(self, resolution: Resolution, name: str) -> float:
        """Squared error that a node itself adds, by its arithmetic and the rounding of its result; 0 in FP32."""
        if self.is_forbidden(resolution, name):
            return FORBIDDEN
        contribution = self.contribution(name, self.computed_in(resolution, name))
        low = resolution.low(name) or (not self.capture.nodes[name].floating and resolution.touches_low(name))
        return min(contribution.own**2, FORBIDDEN) if contribution is not None and low else 0.0

    def computed_in(self, resolution: Resolution, name: str) -> str:
        """The low format that a node computes in, if measured, else the plan's. A recurrent layer runs in FP16 even
        under BF16 autocast."""
        own = self.kept_formats.get(name) or (resolution.nodes[name].dtype if resolution.low(name) else self.format)
        return own if own in self.contributions else self.format

    @cached_property
    def _readers(self) -> Mapping[str, Sequence[str]]:
        return {n.name: [user.name for user in n.users] for n in self.capture.graph_module.graph.nodes}

    def cast_square(self, resolution: Resolution, name: str) -> float:
        """Squared error of rounding an FP32 value to its readers' formats; the largest if these differ."""
        readers = [reader for reader in self._readers.get(name, ()) if name in resolution.nodes[reader].rounded]
        formats = {self.computed_in(resolution, reader) for reader in readers} or {self.format}
        result = [contribution for fmt in formats if (contribution := self.contribution(name, fmt)) is not None]
        return min(max((contribution.cast**2 for contribution in result), default=0.0), FORBIDDEN)

    def rounded_values(self, resolution: Resolution) -> list[str]:
        """Names of FP32 values that are rounded once: cast at a reader, or weights and inputs that are stored low."""
        stored = [p.name for p in self.capture.placeholders if resolution.low(p.name)]
        return [name for name in (*resolution.lowered, *stored) if self.contribution(name, self.format)]
