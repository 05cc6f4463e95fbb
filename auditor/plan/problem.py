"""What the solver weighs: errors, costs and prohibitions of running scopes low, each rounding counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..records import Capture, Contribution, Verdict
from ..replay.resolve import Resolution, resolve
from ..replay.strategies import plain, running
from .costs import Cost

FORBIDDEN = 1e6
"""Squared error charged for running an unsafe node low: more than any budget, yet finite, so that cuts stay exact."""


@dataclass(frozen=True)
class Problem:
    """A capture, its costs and errors, under one strategy and format.

    contributions: per node and placeholder, in this format; verdicts: per node; device: a row of tables/devices.toml.
    """

    capture: Capture
    costs: Mapping[str, Cost]
    contributions: Mapping[str, Contribution]
    verdicts: Mapping[str, Verdict]
    strategy: str
    format: str
    device: str

    @property
    def name(self) -> str:
        """The name of its plan: `autocast_bf16`."""
        return f"{self.strategy}_{self.format}"

    def resolve(self, precision: Callable[[str], str]) -> Resolution:
        """Dtypes of all nodes when every owner has the given precision."""
        return resolve(self.capture, running(self.capture, self.strategy, precision, self.format))

    def forbidden(self, resolution: Resolution, name: str) -> bool:
        """Whether the node is unsafe, or was never tested, and would see a low value."""
        verdict = self.verdicts.get(name)
        if verdict is None or verdict.verdict not in ("unsafe", "untested"):
            return name in resolution.conflicts
        return resolution.touches_low(name)

    def node_square(self, resolution: Resolution, name: str) -> float:
        """Squared contribution of what the node itself adds: its own arithmetic and the rounding of its result."""
        if self.forbidden(resolution, name):
            return FORBIDDEN
        contribution = self.contributions.get(name)
        low = resolution.low(name) or (not self.capture.nodes[name].floating and resolution.touches_low(name))
        return min(contribution.own**2, FORBIDDEN) if contribution is not None and low else 0.0

    def cast_square(self, name: str) -> float:
        """Squared contribution of rounding an FP32 value."""
        return min(self.contributions[name].cast ** 2, FORBIDDEN)

    def rounded_values(self, resolution: Resolution) -> list[str]:
        """FP32 values that are rounded once on their way: cast at a consumer, or stored low (weights, inputs)."""
        stored = [p.name for p in self.capture.placeholders if resolution.low(p.name)]
        return [name for name in (*resolution.lowered, *stored) if name in self.contributions]


def must_stay_fp32(problem: Problem) -> set[str]:
    """Owners of nodes that are unsafe in the format and that the strategy would lower."""
    resolution = problem.resolve(plain(problem.format))
    nodes = problem.capture.nodes
    return {nodes[name].owner for name in nodes if problem.forbidden(resolution, name)}


def compute_dtype(resolution: Resolution, name: str) -> str:
    """Precision a node is timed in; discrete ones move as many bytes either way."""
    return resolution.dtypes.get(name) or "fp32"


def nearest_above(path: str, owners: Mapping[str, object]) -> str | None:
    """The nearest module above `path` that has a say: an owner, or the root. None for the root itself."""
    while path:
        path = path.rpartition(".")[0]
        if path in owners or not path:
            return path
    return None
