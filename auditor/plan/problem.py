"""What the solver weighs: errors, costs and prohibitions of running scopes low, each rounding counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..artefact.base import Strategy
from ..artefact.strategies import strategy_of
from ..execution.policy import Layout, Policy, plain
from ..execution.resolve import Resolution, Resolver, kept_low
from ..numerics.formats import FORMATS
from ..paths import function_in
from ..records import Capture, Contribution, MemoryUse, Node, Verdict
from .costs import TIE, Cost, cast_seconds, elements_of, memory_of, price, traffic_seconds
from .energy import energy_of, timed_in
from .exceptions import find_exceptions, find_lowest
from .mincut import FORBIDDEN, Candidate

ISLAND_SHARE = 0.003
"""Share of the FP32 price that one more scope must be worth: of plans that cost alike, people want the short one."""


@dataclass(frozen=True)
class Problem:
    """A capture, its costs and errors, under one strategy and format.

    contributions: {format: {node or placeholder: Contribution}} of all formats that were measured; verdicts: per node;
    device: a row of devices.toml; raised, stored_low: see Subject. objective: what a plan is to have little of: `time`,
    `memory`, or `flops` in FP32. Prices are in seconds, those of bytes and FLOPs too: the time they take at the device's
    peaks.
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
        """Names of the nodes and placeholders of each path through the model, where there are several in the graph."""
        captures = (path.capture for path in self.capture.paths)
        return list(dict.fromkeys(frozenset((*c.nodes, *(place.name for place in c.placeholders))) for c in captures))

    @cached_property
    def evaluated(self) -> dict[frozenset[str], Candidate]:
        """What is known of choices, by what they keep in FP32: many of them are met again."""
        return {}

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

    def cast_price(self, name: str) -> float:
        """What converting one value counts for."""
        share = 1.0 if self.objective == "time" else TIE
        return share * cast_seconds(self.elements[name], self.format, self.device)

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
        return self._resolver(self.running(precision))

    def running(self, precision: Callable[[str], str]) -> Policy:
        """The capture when every owner has the given precision."""
        return Policy(self.capture, self.strategy, precision, self.format, self.layout)

    @cached_property
    def layout(self) -> Layout:
        """What all policies have in common."""
        return Layout(self.capture, self.how)

    @cached_property
    def kept(self) -> Mapping[str, str]:
        """{node: the format that the author runs it in, whatever the plan}."""
        return kept_low(self.capture, (self.strategy,), self.format)

    def contribution(self, name: str, format: str) -> Contribution | None:
        """What was measured of a node or placeholder in a format; None where it was not."""
        return self.contributions.get(format, {}).get(name)

    def forbidden(self, resolution: Resolution, name: str) -> bool:
        """Whether the node is unsafe, or was never tested, and would see a low value that the plan puts there."""
        verdict = self.verdicts.get(name)
        if name in self.kept or verdict is None or verdict.verdict not in ("unsafe", "untested"):
            return name in resolution.conflicts
        return resolution.touches_low(name)

    def node_square(self, resolution: Resolution, name: str) -> float:
        """Squared contribution of what the node itself adds: its own arithmetic and the rounding of its result."""
        if self.forbidden(resolution, name):
            return FORBIDDEN
        contribution = self.contribution(name, self._computed_in(resolution, name))
        low = resolution.low(name) or (not self.capture.nodes[name].floating and resolution.touches_low(name))
        return min(contribution.own**2, FORBIDDEN) if contribution is not None and low else 0.0

    def _computed_in(self, resolution: Resolution, name: str) -> str:
        """The low format that a node computes in, if measured: a recurrent layer runs in FP16 under BF16 autocast too."""
        own = self.kept.get(name) or (resolution.dtypes[name] if resolution.low(name) else self.format)
        return own if own in self.contributions else self.format

    def cast_square(self, resolution: Resolution, name: str) -> float:
        """Squared contribution of rounding an FP32 value, to the widest-off of the formats that its readers round it to."""
        readers = resolution.lowered.get(name, ())
        formats = {self._computed_in(resolution, reader) for reader in readers} or {self.format}
        result = [contribution for fmt in formats if (contribution := self.contribution(name, fmt)) is not None]
        return min(max((contribution.cast**2 for contribution in result), default=0.0), FORBIDDEN)

    def rounded_values(self, resolution: Resolution) -> list[str]:
        """FP32 values that are rounded once on their way: cast at a consumer, or stored low (weights, inputs)."""
        stored = [p.name for p in self.capture.placeholders if resolution.low(p.name)]
        return [name for name in (*resolution.lowered, *stored) if self.contribution(name, self.format)]
