"""The cheapest precision of every scope for an error: minimum cuts over the scopes, the multiplier on error swept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import networkx as nx

from .costs import Cost, cast_seconds, output_elements, seconds
from .records import Capture, Contribution, Verdict
from .resolve import LOW, Resolution, resolve
from .strategies import plain, readers_of, running

FORBIDDEN = 1e6
"""Squared error charged for running an unsafe node low: more than any budget, yet finite, so that cuts stay exact."""

ISLAND_SHARE = 0.01
"""Share of the FP32 time that one more FP32 scope must be worth: of plans that cost alike, people want the short one."""

SWEEP = 24
SPAN = 1e8


@dataclass(frozen=True)
class Problem:
    """What the solver weighs: a capture, its costs and errors, under one strategy and format.

    contributions: per node and placeholder, in this format. unsafe: nodes that must not run low.
    """

    capture: Capture
    costs: Mapping[str, Cost]
    contributions: Mapping[str, Contribution]
    verdicts: Mapping[str, Verdict]
    strategy: str
    format: str
    device: str


@dataclass(frozen=True)
class Candidate:
    """One point of the Pareto curve. precision: {owner: precision}; seconds: roofline time of one forward.

    price: seconds, plus what its islands must be worth; what the curve is ordered by.
    """

    precision: Mapping[str, str]
    predicted_error: float
    seconds: float
    price: float
    low_flops: float


def candidates(problem: Problem) -> list[Candidate]:
    """Points of the Pareto curve from everything low to everything FP32, fastest first, dominated ones dropped.

    For a multiplier m, the energy  time + m * error^2  is a sum of one term per scope and one per pair of scopes that
    exchange values, and each pair term only penalises unequal labels: its minimum is a minimum cut.
    Source: Kolmogorov and Zabih, What energy functions can be minimized via graph cuts? (2004).
    """
    energy = _energy_of(problem)
    owners = sorted(energy.scopes)
    labelings = {tuple(problem.format for _ in owners), tuple("fp32" for _ in owners)}
    for multiplier in energy.multipliers():
        labels = energy.cut(multiplier)
        labelings.add(tuple("fp32" if owner in labels else problem.format for owner in owners))
    points = [evaluate(problem, dict(zip(owners, labels, strict=True))) for labels in sorted(labelings)]
    points.sort(key=lambda point: (point.price, point.predicted_error))
    front: list[Candidate] = []
    for point in points:
        if not front or point.predicted_error < front[-1].predicted_error:
            front.append(point)
    return front


def evaluate(problem: Problem, precision: Mapping[str, str]) -> Candidate:
    """Predicted error, time and share of low FLOPs of one choice of precisions, each rounding counted once.

    A root without operations of its own takes the precision that most scopes have.
    """
    islands = sum(value == "fp32" for value in precision.values())
    simplicity = islands if islands < len(precision) else 0
    precision = {"": common(precision), **precision}
    resolution = _resolve(problem, lambda owner: precision.get(owner, "fp32"))
    squares, elapsed, plainly, low_flops, flops = 0.0, 0.0, 0.0, 0, 0
    for name in problem.capture.nodes:
        squares += _node_square(problem, resolution, name)
        cost = problem.costs[name]
        dtype = _compute_dtype(resolution, name)
        elapsed += seconds(cost, dtype, problem.device)
        plainly += seconds(cost, "fp32", problem.device)
        flops += cost.flops
        low_flops += cost.flops if dtype in LOW else 0
    elements = output_elements(problem.capture)
    for name in _rounded_values(problem, resolution):
        squares += problem.contributions[name].cast ** 2
    for name in resolution.lowered.keys() & problem.capture.nodes.keys():  # autocast keeps the weights it has cast
        elapsed += cast_seconds(elements[name], problem.device)
    price = elapsed + ISLAND_SHARE * plainly * simplicity
    return Candidate(dict(precision), math.sqrt(squares), elapsed, price, low_flops / flops if flops else 0.0)


def common(precision: Mapping[str, str]) -> str:
    """The precision that most owners have."""
    values = list(precision.values())
    return max(sorted(set(values)), key=values.count) if values else "fp32"


def must_stay_fp32(problem: Problem) -> set[str]:
    """Owners of nodes that are unsafe in the format and that the strategy would lower."""
    resolution = _resolve(problem, plain(problem.format))
    return {
        problem.capture.nodes[name].owner for name in problem.capture.nodes if _forbidden(problem, resolution, name)
    }


def _resolve(problem: Problem, precision: Callable[[str], str]) -> Resolution:
    how = running(problem.capture, problem.strategy, precision, problem.format)
    return resolve(problem.capture, how.setting, placeholder_precision=how.placeholder_precision, literals=how.literals)


def _compute_dtype(resolution: Resolution, name: str) -> str:
    return resolution.dtypes.get(name) or "fp32"


def _forbidden(problem: Problem, resolution: Resolution, name: str) -> bool:
    verdict = problem.verdicts.get(name)
    if verdict is None or verdict.verdict not in ("unsafe", "untested"):
        return name in resolution.conflicts
    return resolution.touches_low(name)


def _node_square(problem: Problem, resolution: Resolution, name: str) -> float:
    if _forbidden(problem, resolution, name):
        return FORBIDDEN
    contribution = problem.contributions.get(name)
    counts = resolution.low(name) or (not problem.capture.nodes[name].floating and resolution.touches_low(name))
    if contribution is None or not counts:
        return 0.0
    return min(contribution.own**2, FORBIDDEN)


def _rounded_values(problem: Problem, resolution: Resolution) -> list[str]:
    """FP32 values that are rounded once on their way: cast at a consumer, or stored low (parameters, inputs)."""
    stored = [p.name for p in problem.capture.placeholders if resolution.low(p.name)]
    return [name for name in (*resolution.lowered, *stored) if name in problem.contributions]


@dataclass
class _Energy:
    scopes: dict[str, tuple[float, float, float]]  # owner: seconds low, seconds fp32, squared error low
    pairs: dict[tuple[str, str], tuple[float, float]]  # producer, consumer: squared error and seconds of the cast
    tied: set[tuple[str, str]]

    def multipliers(self) -> list[float]:
        saved = sum(abs(high - low) for low, high, _ in self.scopes.values())
        harm = sum(error for *_, error in self.scopes.values() if error < FORBIDDEN / 2)
        middle = saved / harm if harm > 0 else 1.0
        return [middle * SPAN ** (step / (SWEEP - 1) - 0.5) for step in range(SWEEP)]

    def cut(self, multiplier: float) -> set[str]:
        """Scopes on the FP32 side of the cheapest cut."""
        graph = nx.DiGraph()
        total = sum(low + high for low, high, _ in self.scopes.values()) or 1.0
        for owner, (low, high, error) in self.scopes.items():
            graph.add_edge(("scope", owner), "high", capacity=min(low + multiplier * error, 1e9 * total) / total)
            graph.add_edge("low", ("scope", owner), capacity=high / total)
        for (producer, consumer), (error, elapsed) in self.pairs.items():
            down = (elapsed + min(multiplier * error, 1e9 * total)) / total
            _add_capacity(graph, ("scope", consumer), ("scope", producer), down)  # producer FP32, consumer low
            _add_capacity(graph, ("scope", producer), ("scope", consumer), elapsed / total)
        for a, b in self.tied:
            graph.add_edge(("scope", a), ("scope", b), capacity=1e12)
            graph.add_edge(("scope", b), ("scope", a), capacity=1e12)
        _, (_, high_side) = nx.minimum_cut(graph, "low", "high")  # of equal cuts, the one with the fewest FP32 scopes
        return {node[1] for node in high_side if isinstance(node, tuple)}


def _add_capacity(graph: nx.DiGraph, source: object, target: object, capacity: float) -> None:
    present = graph.get_edge_data(source, target, {"capacity": 0.0})["capacity"]
    graph.add_edge(source, target, capacity=present + capacity)


def _energy_of(problem: Problem) -> _Energy:
    resolution = _resolve(problem, plain(problem.format))
    nodes, elements, users = problem.capture.nodes, output_elements(problem.capture), _users(problem.capture)
    island = ISLAND_SHARE * sum(seconds(cost, "fp32", problem.device) for cost in problem.costs.values())
    scopes = {node.owner: (0.0, island, 0.0) for node in nodes.values()}

    def charge(owner: str, low: float, high: float, error: float) -> None:
        a, b, c = scopes[owner]
        scopes[owner] = (a + low, b + high, c + error)

    pairs: dict[tuple[str, str], tuple[float, float]] = {}
    for name, node in nodes.items():
        cost = problem.costs[name]
        dtype = _compute_dtype(resolution, name)
        charge(
            node.owner,
            seconds(cost, dtype, problem.device),
            seconds(cost, "fp32", problem.device),
            _node_square(problem, resolution, name),
        )
        for consumer in {nodes[user].owner for user in users.get(name, ())} - {node.owner}:
            if resolution.low(name):
                error, elapsed = pairs.get((node.owner, consumer), (0.0, 0.0))
                square = min(problem.contributions[name].cast ** 2, FORBIDDEN)
                time = cast_seconds(elements[name], problem.device)
                pairs[node.owner, consumer] = (error + square, elapsed + time)
    for name in _rounded_values(problem, resolution):
        readers = {
            nodes[user].owner
            for user in (
                *resolution.lowered.get(name, ()),
                *(users.get(name, ()) if name not in resolution.lowered else ()),
            )
        }
        for owner in readers:
            charge(owner, 0.0, 0.0, problem.contributions[name].cast ** 2 / len(readers))
    return _Energy(scopes, pairs, _tied(problem))


def _users(capture: Capture) -> dict[str, list[str]]:
    """{value: nodes that read it}."""
    found: dict[str, list[str]] = {}
    for node in capture.nodes.values():
        for source in node.inputs:
            found.setdefault(source, []).append(node.name)
    return found


def _tied(problem: Problem) -> set[tuple[str, str]]:
    """Scopes that read one stored tensor: under `cast` it has one precision, so they share theirs."""
    if problem.strategy != "cast":
        return set()
    groups = [owners for owners in readers_of(problem.capture).values() if len(owners) > 1]
    return {(owners[0], other) for owners in groups for other in owners[1:]}
