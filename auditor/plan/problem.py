"""The optimization problem of one plan, and the minimum cut that approximates it: prices, errors and prohibitions of
running each owner in low precision. An owner is a module, or a function in a module, with its own precision."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..artefact.base import Strategy
from ..artefact.strategies import strategy_of
from ..capture.paths import reach
from ..execution.execute import readers_of
from ..execution.policy import Layout, Policy, choice_keeping, plain
from ..execution.resolve import NodeType, Resolution, Resolver, kept_low
from ..numerics.formats import FORMATS
from ..numerics.operations import operation
from ..records import Capture, Contribution, MemoryUse, Node, Placeholder, Verdict
from ..records.paths import FP32_OUTPUT, function_in, nearest_above, of_function
from .costs import TIE, Cost, cast_seconds, elements_of, memory_of, price, seconds, traffic_seconds
from .outputs import fails_by_inputs, products_of, with_fp32_output, without_effect
from .search import FORBIDDEN, Candidate, Energy

ISLAND_SHARE = 0.003
"""Share of the FP32 price that one more scope must save: of two plans with similar cost, the simpler one wins."""


def find_forced_fp32(problem: Problem) -> frozenset[str]:
    """Modules and functions in FP32 to avoid dtype conflicts: operations that get two dtypes raise an error."""
    forced = set[str]()
    while True:
        resolution = problem.resolve(choice_keeping(forced, problem.format))
        conflicts = (name for name in problem.capture.nodes if name in resolution.conflicts - problem.repaired)
        ways = (way - forced for name in conflicts for way in _ways_out(problem, resolution, forced, name))
        if (first := next(filter(None, ways), None)) is None:
            return frozenset(forced)
        forced |= first


def _ways_out(problem: Problem, resolution: Resolution, forced: set[str], conflict: str) -> Iterator[set[str]]:
    """Yield sets of owners whose change to FP32 may avoid a dtype conflict, best first: the module where the last FP32
    input originates, if it has no products; a function that makes such inputs, in the innermost possible module; the
    first module even if it has products; the conflict's own module.

    Functions are tried only for strategies that run scopes without autocast regions, such as `cast`.
    """
    nodes = problem.capture.nodes

    def wide_inputs(name: str) -> list[str]:
        """The FP32 results that an operation reads, of owners that are not forced to FP32."""
        sources = [source for source in nodes[name].inputs if source in nodes]
        free = [source for source in sources if nodes[source].owner not in forced]
        return [source for source in free if resolution.dtypes[source] == "fp32"]

    chain = set(reach(wide_inputs(conflict), wide_inputs))
    functions = dict[str, str]()  # {module: its first function in the chain}
    makers = set[str]()  # the module of the last operation whose inputs are outside the chain
    for name, node in nodes.items():
        if name not in chain:
            continue
        if node.function is not None and not operation(node.op).cast:
            functions.setdefault(node.owner, function_in(node.owner, node.function.path))
        if chain.isdisjoint(node.inputs):
            makers = {node.owner}
    made = [node for owner in makers for node in problem.operations_of[owner]]
    if not any(operation(node.op).product for node in made):
        yield makers
    if not problem.how.regional:
        innermost_first = reversed(nodes[conflict].calls)
        within = [functions[call.path] for call in innermost_first if call.path in functions]
        yield set(within[:1])
    yield makers
    yield {nodes[conflict].owner}


def find_exceptions(problem: Problem) -> Mapping[str, frozenset[str]]:
    """{module: functions that it may keep in FP32}, for modules whose own products are worth running in low precision.

    Such a module needs a safe product, or a sensitive product beside a function that is unsafe or untested.
    """
    result = dict[str, frozenset[str]]()
    for owner, nodes in problem.operations_of.items():
        products = defaultdict[str, set[str]](set)  # {verdict: functions with such a product}
        functions = defaultdict[str, set[str]](set)  # {verdict: functions with such an operation}
        for node in nodes:
            path = node.function.path if node.function else ""
            verdict = _verdict_if_lowered(problem, node)
            if problem.costs[node.name].flops and operation(node.op).product:
                products[verdict].add(path)
            if path and not operation(node.op).cast:
                functions[verdict].add(path)
        unsafe = functions["unsafe"] | functions["untested"]
        kept = unsafe | functions["sensitive"]
        has_safe_product = bool(products["safe"] - kept)
        has_other_product = bool((products["safe"] | products["sensitive"]) - unsafe)
        if has_safe_product or (unsafe and has_other_product):
            result[owner] = frozenset(kept)
    for owner, name in filter(None, map(of_function, problem.forced_fp32)):
        result[owner] = result.get(owner, frozenset()) | {name}
    return {owner: names for owner, names in result.items() if names}


def _verdict_if_lowered(problem: Problem, node: Node) -> str:
    """The verdict of an operation; "safe" also for one that no plan lowers."""
    judged = problem.verdicts.get(node.name)
    can_be_low = node.name not in problem.kept_formats and problem.lowest.touches_low(node.name)
    if judged is None or not can_be_low:
        return "safe"
    return judged.verdict


def timed_in(resolution: Resolution, name: str) -> str:
    """Format for predicting a node's time; FP32 for dtypes that no plan changes, such as integers."""
    return resolution.nodes[name].factors or resolution.computed_format(name) or "fp32"


class EnergyTerms:
    """Sums the prices and squared errors of one problem into the terms that a minimum cut can minimize.

    scopes: {owner: (price in low precision, price in FP32, squared error in low precision)}. pairs: {(producer,
    consumer): (squared error, seconds) of the casts between both owners if their precisions differ}.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.resolution = problem.lowest
        self.owner_of = {name: problem.variable(name) for name in problem.capture.nodes}
        self.scopes = dict.fromkeys((*problem.layout.owners, *kept_functions(problem)), (0.0, 0.0, 0.0))
        self.pairs = dict[tuple[str, str], tuple[float, float]]()

    def add_owner_costs(self, owners: Collection[str], low: float, high: float, square: float) -> None:
        """Split a node's price in low precision, its price in FP32, and its squared error equally over its owners."""
        for owner in owners:
            old_low, old_high, old_square = self.scopes[owner]
            self.scopes[owner] = (
                old_low + low / len(owners),
                old_high + high / len(owners),
                old_square + square / len(owners),
            )

    def add_cast_cost(self, producer: str, consumer: str, value: str) -> None:
        """Charge a cast of `value` that happens only if producer and consumer have different precisions."""
        old_square, old_price = self.pairs.get((producer, consumer), (0.0, 0.0))
        readers = [user for user in self.problem.users[value] if self.owner_of[user] == consumer]
        square = self.problem.cast_square(self.resolution, value, readers)
        price = self.problem.cast_price([value])
        self.pairs[producer, consumer] = (old_square + square, old_price + price)

    def add_nodes(self) -> float:
        """Add all operations and stored tensors; returns the price of all operations in FP32."""
        problem = self.problem
        readers = readers_of(problem.capture)
        # `figures` reuses its array, so the first result is copied before the second call
        squares, low_prices, *_ = problem.figures(self.resolution).tolist()
        _, high_prices, *_ = problem.figures(problem.resolve(plain("fp32"))).tolist()
        rows = zip(problem.node_types, low_prices, high_prices, squares, strict=True)
        for name, low, high, square in rows:
            if name in self.owner_of:
                self.add_owner_costs([self.owner_of[name]], low, high, square)
                self.add_casts_of_result(name)
            else:  # a stored tensor: the owners that read it pay
                self.add_owner_costs(readers.get(name, ()), low, high, square)
        operations = len(problem.costs)  # the first rows; stored tensors follow
        return sum(high_prices[:operations])

    def add_casts_of_result(self, name: str) -> None:
        """Charge the casts of an operation's low-precision result for the other owners that read it."""
        if not self.resolution.low(name):
            return
        producer = self.owner_of[name]
        consumers = {self.owner_of[user] for user in self.problem.users.get(name, ())}
        for consumer in consumers - {producer}:
            self.add_cast_cost(producer, consumer, name)

    def forbid(self, owner: str) -> None:
        """Make low precision in an owner so expensive that no choice includes it."""
        self.add_owner_costs([owner], 0.0, 0.0, FORBIDDEN)

    def add_rounded_values(self) -> None:
        """Add the errors of rounding FP32 values for low-precision operations, weights and inputs."""
        problem = self.problem
        stored_inputs = problem.layout.inputs if "input" in problem.how.stores else ()
        for name, square in problem.cast_squares(self.resolution).items():
            casters = self.casters_of(name)
            if name not in stored_inputs:
                self.add_owner_costs(casters, 0.0, 0.0, square)
                continue
            root = ""
            self.add_owner_costs([root], 0.0, 0.0, square)
            for owner in casters - {root}:  # if the root does not round its inputs, their readers do
                self.add_cast_cost(root, owner, name)

    def casters_of(self, value: str) -> set[str]:
        """The owners that round a value: those of the operations that read it rounded, otherwise of all readers."""
        readers = self.resolution.readers_of_rounded.get(value) or self.problem.users.get(value, [])
        # the graph's output has no owner, so the value's producer casts it
        producer = self.owner_of.get(value, "")
        return {self.owner_of.get(reader, producer) for reader in readers}


def kept_functions(problem: Problem) -> list[str]:
    """All functions that their modules may keep in FP32, as `variable` names them."""
    exceptions = problem.exceptions.items()
    return [function_in(owner, name) for owner, names in exceptions for name in sorted(names)]


def tied_owners(problem: Problem) -> set[tuple[str, str]]:
    """Pairs of owners that share a stored tensor, which can have only one precision."""
    deciding = problem.layout.deciding_owners
    return {pair for place in problem.stored_tensors for pair in pairwise(deciding.get(place.name, ()))}


def shielded_owners(problem: Problem) -> frozenset[str]:
    """Owners that can be low only if the owner above is: functions, and, under strategies with autocast regions, modules
    that the model's code always calls with autocast switched off."""
    shielded = set(kept_functions(problem))
    if problem.how.regional:
        nodes = problem.capture.nodes.values()
        shielded |= {node.owner for node in nodes} - {node.owner for node in nodes if _allows_autocast(node)}
    return frozenset(shielded)


def _allows_autocast(node: Node) -> bool:
    """Whether an operation's module is called with autocast on: a region that switches it off begins inside, if any."""
    region = node.region
    return region is None or region.enabled or len(node.calls) <= region.depth


def energy_of(problem: Problem) -> Energy:
    """Build a problem's Energy, from prices and errors with all in FP32, and with all possible in low precision."""
    terms = EnergyTerms(problem)
    fp32_price = terms.add_nodes()
    for owner in problem.forced_fp32:
        terms.forbid(owner)
    terms.add_rounded_values()
    scopes_above = {owner: nearest_above(owner, terms.scopes) for owner in terms.scopes}
    return Energy(
        scopes=terms.scopes,
        pairs=terms.pairs,
        tree={owner: above for owner, above in scopes_above.items() if above is not None},
        tied=tied_owners(problem),
        island=ISLAND_SHARE * fp32_price,
        shielded=shielded_owners(problem),
    )


@dataclass(frozen=True)
class Problem:
    """The recorded graph with its costs and errors, under one strategy and format.

    contributions: {format: {node or placeholder: Contribution}} of all measured formats. verdicts: per node, in the
    format that the node computes in if everything is in low precision. device: name of a GPU in devices.toml.
    objective: what the plan minimizes: `time`, `memory`, or `flops` in FP32. All prices are in seconds: bytes and FLOPs
    count as the time that they take at the device's peak rates. repaired: nodes that are assumed to be repaired in the
    model's source, see repairs.py; lowered: nodes and placeholders in FP32 that are then converted to the dtype of the low-precision values
    which they meet; made_low: operations whose FP32 results are then made in low precision. rewritten: those of
    `repaired` that compute in low precision.
    """

    capture: Capture
    costs: Mapping[str, Cost]
    contributions: Mapping[str, Mapping[str, Contribution]]
    verdicts: Mapping[str, Verdict]
    strategy: str
    format: str
    device: str
    objective: str = "time"
    repaired: frozenset[str] = frozenset()
    lowered: frozenset[str] = frozenset()
    made_low: frozenset[str] = frozenset()
    rewritten: frozenset[str] = frozenset()
    evaluated: dict[frozenset[str], Candidate] = field(default_factory=dict, init=False, repr=False, compare=False)
    """{modules and functions in FP32: Candidate}, the cache of `evaluate`."""

    @property
    def name(self) -> str:
        """Name of the plan, such as `autocast_bf16`."""
        return f"{self.strategy}_{self.format}"

    @property
    def how(self) -> Strategy:
        """The Strategy under which the plan runs the model."""
        return strategy_of(self.strategy)

    @cached_property
    def elements(self) -> Mapping[str, int]:
        """{node or placeholder: number of floating-point elements in its result}."""
        return {node.name: elements_of(node) for node in self.capture.graph_module.graph.nodes}

    @cached_property
    def operations_of(self) -> Mapping[str, Sequence[Node]]:
        """{module path: operations directly in this module}."""
        result: dict[str, list[Node]] = {}
        for node in self.capture.nodes.values():
            result.setdefault(node.owner, []).append(node)
        return result

    @property
    def stored_tensors(self) -> list[Placeholder]:
        """Weights, buffers and constants that the strategy stores in their scope's precision."""
        return [place for place in self.capture.placeholders if place.kind in self.how.stores - {"input"}]

    @cached_property
    def paths(self) -> Sequence[frozenset[str]]:
        """For each path through the model, the names of its nodes and placeholders."""
        captures = [path.capture for path in self.capture.paths] or [self.capture]
        return [frozenset((*one.nodes, *(place.name for place in one.placeholders))) for one in captures]

    @cached_property
    def node_types(self) -> dict[str, NodeType | None]:
        """{node or stored tensor: its dtypes in the last call of `figures`}."""
        return dict.fromkeys((*self.costs, *(place.name for place in self.stored_tensors)))

    @cached_property
    def _figures(self) -> NDArray[np.float64]:
        return np.zeros((4, len(self.node_types)))

    energy = cached_property(energy_of)
    forced_fp32 = cached_property(find_forced_fp32)

    @cached_property
    def lowest(self) -> Resolution:
        """Dtypes of all nodes with everything in low precision, except to avoid dtype conflicts."""
        return self.resolve(choice_keeping(self.forced_fp32, self.format))

    exceptions = cached_property(find_exceptions)

    @cached_property
    def products(self) -> Mapping[str, frozenset[str]]:
        """{path of a function that can have FP32 output: its matrix products}."""
        return products_of(self.capture, self.kept_formats)

    def variable(self, name: str) -> str:
        """Path of the module, or of the function in a module (see paths.function_in), that sets a node's precision."""
        node = self.capture.nodes[name]
        if node.function is None or node.function.path not in self.exceptions.get(node.owner, ()):
            return node.owner
        return function_in(node.owner, node.function.path)

    @cached_property
    def _resolver(self) -> Resolver:
        return Resolver(self.capture, self.lowered, self.made_low)

    def cast_price(self, values: Iterable[str]) -> float:
        """Price of converting values once between FP32 and the plan's format."""
        elapsed = cast_seconds(sum(self.elements[name] for name in values), self.format, self.device)
        return elapsed if self.objective == "time" else TIE * elapsed

    def evaluate(self, high: Collection[Any]) -> Candidate:
        """Predict error, price and time of the choice with `high` (modules and functions) in FP32; cached.

        Owners that `high` forces to FP32 are added; FP32 outputs without effect are removed. If batches take several
        paths through the model, the error is the largest of any path.
        """
        high = self._complete(high)
        if high not in self.evaluated:
            self.evaluated[high] = self._predict(high)
        return self.evaluated[high]

    def _complete(self, high: Collection[Any]) -> frozenset[str]:
        """All FP32 modules and functions, and the FP32 outputs that have an effect, of a choice."""
        owners = self.energy.complete(self.energy.scopes.keys() & high)
        outputs = self.products.keys() & high
        if not outputs:
            return owners
        with_outputs = owners | outputs
        return with_outputs - without_effect(with_outputs)

    def _predict(self, high: frozenset[str]) -> Candidate:
        resolution = self.resolve(choice_keeping(high, self.format))
        figures = self.figures(resolution)
        squares = self.squares(resolution, figures[0])
        error = math.sqrt(max(sum(square for name, square in squares.items() if name in path) for path in self.paths))
        _, price, elapsed, _ = figures.sum(axis=1).tolist()
        # Autocast caches cast weights, so only casts of activations take time.
        cast = self.costs.keys() & {source for typed in resolution.nodes.values() for source in typed.cast}
        elapsed += cast_seconds(sum(self.elements[name] for name in cast), self.format, self.device)
        if self.objective == "memory":
            needed = self.memory(resolution)
            cost = traffic_seconds(needed.weights + needed.activations, self.device) + TIE * elapsed
        else:
            cost = price + self.cast_price(cast)
        price_of_changes = self.energy.island * self._changes_of_precision(high)
        return Candidate(high, error, cost + price_of_changes, cost, elapsed)

    def _changes_of_precision(self, high: frozenset[str]) -> int:
        """Number of scopes that differ from the scope above, and of products with FP32 output."""
        scopes = sum((owner in high) != (above in high) for owner, above in self.energy.tree.items())
        outputs = sum(path.endswith(FP32_OUTPUT) for path in high)
        return scopes + outputs

    def cheapest(self, allowed: float) -> Candidate:
        """The cheapest choice found with a predicted error of at most `allowed`."""
        return self.energy.cuts.cheapest(self.evaluate, allowed, self.energy.groups, len(self.capture.nodes))

    def figures(self, resolution: Resolution) -> NDArray[np.float64]:
        """[4, nodes and stored tensors]: squared error, price, predicted seconds, low-precision FLOPs.

        The array is reused: only columns whose dtypes differ from the last choice of precisions are computed again.
        """
        for i, (name, last) in enumerate(self.node_types.items()):
            typed = resolution.nodes[name]
            if typed is not last:
                self.node_types[name] = typed
                self._figures[:, i] = self._figures_of(resolution, name)
        return self._figures

    def _figures_of(self, resolution: Resolution, name: str) -> tuple[float, float, float, float]:
        if name not in self.costs:
            return 0.0, self._price_of_stored(resolution, name), 0.0, 0.0
        cost = with_fp32_output(self.costs[name], resolution.nodes[name].factors, self.elements[name])
        fmt = timed_in(resolution, name)
        square = self.node_square(resolution, name)
        own = price(self.objective, cost, self.elements[name], fmt, self.device)
        elapsed = seconds(cost, fmt, self.device)
        if name in self.repaired and FORMATS[fmt].low:
            slowdown = self._slowdown_by_repair(name, fmt)
            own += slowdown
            elapsed += slowdown
        return square, own, elapsed, cost.flops * FORMATS[fmt].low

    def _price_of_stored(self, resolution: Resolution, name: str) -> float:
        """Price of a stored tensor's bytes, which only plans for less memory pay."""
        if self.objective != "memory":
            return 0.0
        fmt = self.format if resolution.low(name) else "fp32"
        return traffic_seconds(1, self.device) * self.elements[name] * FORMATS[fmt].bytes

    def _slowdown_by_repair(self, name: str, fmt: str) -> float:
        """Seconds by which a repaired operation is slower than its low-precision kernel: it computes in FP32, converts
        inputs that are not repaired operations' results, and converts its result for other readers. A product is
        repaired by scaling, which takes no such time."""
        cost, nodes = self.costs[name], self.capture.nodes
        if cost.free or cost.flops or name in self.rewritten:
            return 0.0
        values = [source for source in dict.fromkeys(nodes[name].inputs) if source not in self.repaired]
        if not self.repaired.issuperset(self.users.get(name, ())) or not self.users.get(name):
            values.append(name)
        wide = seconds(cost, "fp32", self.device) - seconds(cost, fmt, self.device)
        return wide + cast_seconds(sum(self.elements.get(value, 0) for value in values), fmt, self.device)

    @cached_property
    def least(self) -> float:
        """Lower bound of all prices: each node in its cheapest format; 0 for memory, which is no sum over nodes."""
        if self.objective == "memory":
            return 0.0
        formats = {"fp32", self.format, *self.kept_formats.values()}
        cheapest = list[float]()
        for name, cost in self.costs.items():
            elements = self.elements[name]
            cheapest.append(min(price(self.objective, cost, elements, fmt, self.device) for fmt in formats))
        return sum(cheapest)

    def squares(self, resolution: Resolution, own: NDArray[np.float64]) -> dict[str, float]:
        """{node or placeholder: squared error that it adds to the outputs}, including the rounding of its result; nodes
        that add no error may be missing. own: squared errors from `figures`."""
        result = self.cast_squares(resolution)
        return result | {n: result.get(n, 0.0) + x for n, x in zip(self.node_types, own.tolist(), strict=True) if x}

    def cast_squares(self, resolution: Resolution) -> dict[str, float]:
        """{value that is rounded once: squared error of its rounding}: FP32 values cast for an operation, weights and
        inputs stored in low precision."""
        readers, measured = resolution.readers_of_rounded, self.contributions.get(self.format, {})
        stored = filter(resolution.low, self._measured_placeholders)
        names = (name for name in (*readers, *stored) if name in measured)
        return {name: self.cast_square(resolution, name, readers.get(name, ())) for name in names}

    @cached_property
    def _measured_placeholders(self) -> list[str]:
        """Names of the placeholders whose rounding was measured."""
        measured = self.contributions.get(self.format, {})
        return [place.name for place in self.capture.placeholders if place.name in measured]

    def memory(self, resolution: Resolution) -> MemoryUse:
        """Predicted memory of one forward, see costs.memory_of."""
        return memory_of(self.capture, self.costs, resolution, self.format)

    def resolve(self, precision: Callable[[str], str]) -> Resolution:
        """Dtypes of all nodes if modules and functions have the precisions that `precision` returns."""
        return self._resolver(self.policy_for(precision))

    def policy_for(self, precision: Callable[[str], str]) -> Policy:
        """The Policy in which modules and functions have the precisions that `precision` returns."""
        return Policy(self.capture, self.strategy, precision, self.format, self.layout)

    @cached_property
    def layout(self) -> Layout:
        """The Layout that all policies of this problem share."""
        return Layout(self.capture, self.how)

    @cached_property
    def kept_formats(self) -> Mapping[str, str]:
        """{node: the format that the model's code prescribes for it under every plan}."""
        return kept_low(self.capture, (self.strategy,), self.format)

    def contribution(self, name: str, format: str) -> Contribution | None:
        """Measured contribution of a node or placeholder in a format; None if not measured."""
        return self.contributions.get(format, {}).get(name)

    def is_forbidden(self, resolution: Resolution, name: str) -> bool:
        """Whether any node gets two dtypes, or an unsafe or untested node has a low-precision result, or computes a
        discrete or complex result from low-precision values. For products with FP32 output, only failures on rounded inputs
        count."""
        verdict, typed = self.verdicts.get(name), resolution.nodes[name]
        kind = "" if verdict is None or name in self.kept_formats else verdict.verdict
        conflict = typed.conflict and name not in self.repaired
        if conflict or kind not in ("unsafe", "untested"):
            return conflict
        if typed.factors:
            return kind == "untested" or fails_by_inputs(self.contribution(name, self.format))
        node = self.capture.nodes[name]
        is_complex = node.dtype.startswith("complex")  # BF16 has no complex numbers: the result is in no format
        return resolution.touches_low(name) and (resolution.low(name) or not node.floating or is_complex)

    def node_square(self, resolution: Resolution, name: str) -> float:
        """Squared error that a node itself adds, by its arithmetic and the rounding of its result; 0 in FP32."""
        if self.is_forbidden(resolution, name):
            return FORBIDDEN
        contribution = self.contribution(name, self.computed_in(resolution, name))
        low = resolution.low(name) or (not self.capture.nodes[name].floating and resolution.touches_low(name))
        return min(contribution.own**2, FORBIDDEN) if contribution is not None and low else 0.0

    def computed_in(self, resolution: Resolution, name: str) -> str:
        """The low-precision format that a node computes in, if measured, else the plan's format. A recurrent layer runs
        in FP16 even under BF16 autocast."""
        own = self.kept_formats.get(name, "")
        if not own and resolution.low(name):
            own = resolution.nodes[name].dtype
        return own if own in self.contributions else self.format

    def cast_square(self, resolution: Resolution, name: str, readers: Collection[str]) -> float:
        """Squared error of rounding an FP32 value for the operations `readers`: the largest over their formats."""
        formats = frozenset(self.computed_in(resolution, reader) for reader in readers) or frozenset({self.format})
        key = (name, tuple(readers), formats)
        if key not in self._squares_of_casts:
            self._squares_of_casts[key] = self._square_of_cast(*key)
        return self._squares_of_casts[key]

    @cached_property
    def _squares_of_casts(self) -> dict[tuple[str, tuple[str, ...], frozenset[str]], float]:
        """{(value, its readers, their formats): squared error}, the cache of `cast_square`."""
        return {}

    def _square_of_cast(self, name: str, readers: Collection[str], formats: Collection[str]) -> float:
        squares = list[float]()
        for fmt in formats:
            contribution = self.contribution(name, fmt)
            if contribution is not None:
                squares.append(contribution.cast**2 * self._share(name, readers, fmt))
        return min(max(squares, default=0.0), FORBIDDEN)

    def _share(self, name: str, readers: Collection[str], format: str) -> float:
        """The share of a value's squared rounding error that reaches the outputs through `readers`, if other operations
        read the FP32 value; errors through several readers count as independent. 1 if unknown."""
        contributions = [self.contribution(reader, format) for reader in readers]
        reads = [known.reads if known is not None else {} for known in contributions]
        if not reads or len(reads) >= len(self.users[name]):
            return 1.0
        if not all(name in shares for shares in reads):
            return 1.0
        return sum(shares[name] ** 2 for shares in reads)

    @cached_property
    def users(self) -> Mapping[str, Sequence[str]]:
        """{node or placeholder: operations that read it}."""
        operations = self.capture.nodes
        readers = dict[str, list[str]]()
        for node in self.capture.graph_module.graph.nodes:
            readers[node.name] = [user.name for user in node.users if user.name in operations]
        return readers
