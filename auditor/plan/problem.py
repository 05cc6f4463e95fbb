"""What the solver weighs: errors, costs and prohibitions of running scopes low, each rounding counted once; what can be
low together, and functions that low modules may keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..artefact.base import Strategy
from ..artefact.strategies import strategy_of
from ..capture.paths import reach
from ..execution.policy import Layout, Policy, choice_keeping, plain
from ..execution.resolve import Resolution, Resolver, kept_low
from ..numerics.formats import FORMATS
from ..numerics.operations import operation
from ..paths import function_in, of_function
from ..records import Capture, Contribution, MemoryUse, Node, Verdict
from .costs import TIE, Cost, elements_of, memory_of, price, traffic_seconds
from .energy import energy_of, timed_in
from .mincut import FORBIDDEN, Candidate

ISLAND_SHARE = 0.003
"""Share of the FP32 price that one more scope must be worth: of plans that cost alike, people want the short one."""


@dataclass(frozen=True)
class Lowest:
    """The lowest choice without conflicts. raised: modules, and functions in some, at which one would be were they low."""

    resolution: Resolution
    raised: frozenset[str]


def find_lowest(problem: Problem) -> Lowest:
    """Everything low but what cannot be together: those that make the FP32 values, those that meet them, or one function.

    Whichever leaves the lower price, and of equal ones the fewer.
    """

    def rank(found: Lowest) -> tuple[bool, float, int]:
        price = sum(problem.node_price(name, found.resolution) for name in problem.capture.nodes)
        return bool(found.resolution.conflicts), price, len(found.raised)

    return min(
        (_without_conflicts(problem, blamed) for blamed in (_makers, _function, lambda *_: set[str]())), key=rank
    )


def _without_conflicts(problem: Problem, blamed: Callable[[Problem, Resolution, str], set[str]]) -> Lowest:
    """blamed: what to raise for the conflict of one node; nothing, or what is raised already: the module that meets FP32."""
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
    """Conflicts that no other one lies before: those behind may be its consequences."""
    behind, result = set[str](), []
    for name, node in problem.capture.nodes.items() if resolution.conflicts else ():
        tainted = any(source in behind for source in node.inputs)
        if name in resolution.conflicts and not tainted:
            result.append(name)
        if tainted or name in resolution.conflicts:
            behind.add(name)
    return result


def _makers(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """Modules that make the FP32 values."""
    nodes, chain = problem.capture.nodes, _chain(problem, resolution, name)
    return {nodes[each].owner for each in chain if not any(before in chain for before in nodes[each].inputs)}


def _function(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """A function that gives FP32 anyhow, in the innermost module around the node that calls one.

    A scope that keeps a function runs its products low again, whatever they are handed; it has to keep one to do so.
    """
    nodes, chain = problem.capture.nodes, _chain(problem, resolution, name)
    giving = [each for each in nodes if each in chain and _entry(problem, each) and not problem.how.regional]
    for call in reversed(nodes[name].calls):
        if (first := next((each for each in giving if nodes[each].owner == call.path), None)) is not None:
            return {function_in(call.path, _entry(problem, first))}
    return set()


def _entry(problem: Problem, name: str) -> str:
    """What `keep` calls the function that a node is part of; "" for one that says itself what it gives."""
    node = problem.capture.nodes[name]
    return "" if node.function is None or operation(node.op).cast else node.function.path


def _chain(problem: Problem, resolution: Resolution, name: str) -> set[str]:
    """Operations that make the FP32 values that a node is handed in a low scope."""
    nodes = problem.capture.nodes

    def wide_inputs(each: str) -> list[str]:
        return [source for source in nodes[each].inputs if source in nodes and resolution.dtypes.get(source) == "fp32"]

    return set(reach(wide_inputs(name), wide_inputs))


def find_exceptions(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{module: functions}, of modules whose own forward has products that are worth running low.

    Beside functions that are unsafe, a product that is dear in error may still run low; beside dear ones alone it need not.
    """
    products, functions = dict[tuple[str, str], set[str]](), dict[tuple[str, str], set[str]]()  # by module and verdict
    casts = dict[str, set[str]]()  # to what Python sees, which FP32 arguments would change
    for name, node in problem.capture.nodes.items():
        known, path = problem.verdicts.get(name), node.function.path if node.function else ""
        lowered = name not in problem.kept_formats and problem.lowest.resolution.touches_low(name)
        place = node.owner, known.verdict if known is not None and lowered else "safe"  # else nobody lowers it
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
class Problem:
    """A capture, its costs and errors, under one strategy and format.

    contributions: {format: {node or placeholder: Contribution}} of all formats that were measured. verdicts: per node, in
    the format that it computes in where all is low. device: a row of devices.toml. raised, stored_low: see Subject.
    objective: what a plan is to have little of: `time`, `memory`, or `flops` in FP32. Prices are in seconds, those of
    bytes and FLOPs too: the time they take at the device's peaks.
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
    """What is known of choices, by what they keep in FP32: many of them are met again."""

    @property
    def name(self) -> str:
        """The name of its plan: `autocast_bf16`."""
        return f"{self.strategy}_{self.format}"

    @property
    def how(self) -> Strategy:
        """What its strategy means."""
        return strategy_of(self.strategy)

    @cached_property
    def elements(self) -> Mapping[str, int]:
        """{node or placeholder: floating elements of its result}."""
        return {node.name: elements_of(node) for node in self.capture.graph_module.graph.nodes}

    @cached_property
    def operations_of(self) -> Mapping[str, Sequence[Node]]:
        """{owner: its own operations}."""
        result: dict[str, list[Node]] = {}
        for node in self.capture.nodes.values():
            result.setdefault(node.owner, []).append(node)
        return result

    @cached_property
    def paths(self) -> Sequence[frozenset[str]]:
        """Names of the nodes and placeholders of each path through the model."""
        captures = [path.capture for path in self.capture.paths] or [self.capture]
        return list(dict.fromkeys(frozenset((*c.nodes, *(place.name for place in c.placeholders))) for c in captures))

    energy = cached_property(energy_of)
    lowest = cached_property(find_lowest)
    exceptions = cached_property(find_exceptions)

    def variable(self, name: str) -> str:
        """What decides the precision of a node: its module, or a function in it (see paths.function_in)."""
        node = self.capture.nodes[name]
        if node.function is None or node.function.path not in self.exceptions.get(node.owner, ()):
            return node.owner
        return function_in(node.owner, node.function.path)

    @cached_property
    def _resolver(self) -> Resolver:
        return Resolver(self.capture)

    @cached_property
    def island(self) -> float:
        """What one more scope in the plan must save."""
        raised = self.resolve(plain("fp32"))
        return ISLAND_SHARE * sum(self.node_price(name, raised) for name in self.capture.nodes)

    def node_price(self, name: str, resolution: Resolution) -> float:
        """What one node counts for, as the objective has it."""
        return price(self.objective, self.costs[name], self.elements[name], timed_in(resolution, name), self.device)

    @property
    def byte_price(self) -> float:
        """What a byte of stored weights counts for; 0 for strategies that look at time alone."""
        return traffic_seconds(1, self.device) if self.objective == "memory" else self.how.seconds_per_byte

    def whole_price(self, resolution: Resolution, elapsed: float) -> float:
        """What a choice counts for, but for its length. elapsed: seconds of one forward under it."""
        if self.objective == "memory":
            needed = self.memory(resolution)
            return traffic_seconds(needed.weights + needed.activations, self.device) + TIE * elapsed
        if self.objective == "flops":
            elapsed = sum(self.node_price(name, resolution) for name in self.capture.nodes)
        weights = (p.name for p in self.capture.placeholders if p.kind in self.how.stores - {"input"})
        stored = {name: self.format if resolution.low(name) else "fp32" for name in weights}
        return elapsed + sum(self.stored_price(name, precision) for name, precision in stored.items())

    def memory(self, resolution: Resolution) -> MemoryUse:
        """Bytes that one forward needs."""
        return memory_of(self.capture, self.costs, resolution, self.format)

    def stored_price(self, name: str, precision: str) -> float:
        """What one weight counts for, stored in a precision."""
        return self.byte_price * self.elements[name] * FORMATS[precision].bytes

    def resolve(self, precision: Callable[[str], str]) -> Resolution:
        """Dtypes of all nodes when every owner has the given precision."""
        return self._resolver(self.policy_for(precision))

    def policy_for(self, precision: Callable[[str], str]) -> Policy:
        """The capture when every owner has the given precision."""
        return Policy(self.capture, self.strategy, precision, self.format, self.layout)

    @cached_property
    def layout(self) -> Layout:
        """What all policies have in common."""
        return Layout(self.capture, self.how)

    @cached_property
    def kept_formats(self) -> Mapping[str, str]:
        """{node: the format that the author runs it in, whatever the plan}."""
        return kept_low(self.capture, (self.strategy,), self.format)

    def contribution(self, name: str, format: str) -> Contribution | None:
        """What was measured of a node or placeholder in a format; None where it was not."""
        return self.contributions.get(format, {}).get(name)

    def is_forbidden(self, resolution: Resolution, name: str) -> bool:
        """Whether the node is unsafe, or was never tested, and would see a low value that the plan puts there."""
        verdict = self.verdicts.get(name)
        if name in self.kept_formats or verdict is None or verdict.verdict not in ("unsafe", "untested"):
            return name in resolution.conflicts
        return resolution.touches_low(name)

    def node_square(self, resolution: Resolution, name: str) -> float:
        """Squared contribution of what the node itself adds: its own arithmetic and the rounding of its result."""
        if self.is_forbidden(resolution, name):
            return FORBIDDEN
        contribution = self.contribution(name, self.computed_in(resolution, name))
        low = resolution.low(name) or (not self.capture.nodes[name].floating and resolution.touches_low(name))
        return min(contribution.own**2, FORBIDDEN) if contribution is not None and low else 0.0

    def computed_in(self, resolution: Resolution, name: str) -> str:
        """The low format that a node computes in, if measured: a recurrent layer runs in FP16 under BF16 autocast too."""
        own = self.kept_formats.get(name) or (resolution.dtypes[name] if resolution.low(name) else self.format)
        return own if own in self.contributions else self.format

    def cast_square(self, resolution: Resolution, name: str) -> float:
        """Squared contribution of rounding an FP32 value, to the widest-off of the formats that its readers round it to."""
        readers = resolution.lowered.get(name, ())
        formats = {self.computed_in(resolution, reader) for reader in readers} or {self.format}
        result = [contribution for fmt in formats if (contribution := self.contribution(name, fmt)) is not None]
        return min(max((contribution.cast**2 for contribution in result), default=0.0), FORBIDDEN)

    def rounded_values(self, resolution: Resolution) -> list[str]:
        """FP32 values that are rounded once on their way: cast at a consumer, or stored low (weights, inputs)."""
        stored = [p.name for p in self.capture.placeholders if resolution.low(p.name)]
        return [name for name in (*resolution.lowered, *stored) if self.contribution(name, self.format)]
