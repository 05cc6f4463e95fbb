"""A model that answers with choices alone: what decides them, and how large an error there changes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..formats.entries import is_number
from ..ops.nodes import tensors_of
from ..records import Capture
from .measure import Measurement, before
from .rerun import Reruns

DRAWS = 8
"""Errors tried at what decides."""

REACH = 3.0
"""How many times as large as the error of an operation they are: so far may single entries lie beside the others."""


def answered(measurement: Measurement) -> list[torch.Tensor]:
    """The outputs inside the autograd graph; of a model that answers with choices alone, the numbers that decide them."""
    if not only_choices(measurement.capture):
        return list(measurement.outputs)
    return [leaf for name in deciders(measurement.capture) for leaf in measurement.live[name]]


def only_choices(capture: Capture) -> bool:
    """Whether no output is a number that a format could round."""
    return not any(name not in capture.nodes or capture.nodes[name].floating for name in capture.outputs)


def deciders(capture: Capture) -> list[str]:
    """Floating nodes that the last choices before the outputs read."""
    return [node.name for node in _read_last(capture) if node.name in capture.nodes]


def through(capture: Capture) -> frozenset[str]:
    """Nodes that reach the outputs by the deciders alone, and by no earlier choice: their errors add up there."""
    last = _read_last(capture)
    behind = before(last)
    earlier = {n for n in behind if not _floating(n) and any(_floating(source) for source in n.all_input_nodes)}
    return frozenset(node.name for node in behind - before(earlier))


@dataclass(frozen=True)
class Held:
    """What errors at the deciders were tried: of relative L2 `level`, with outputs off by `error` at most."""

    names: frozenset[str] = frozenset()
    level: float = 0.0
    error: float = 0.0

    def share(self, level: float) -> float:
        """What errors of another level take: choices near a tie change in proportion."""
        return self.error * level / self.level if self.level else 0.0


def held(reruns: Reruns, levels: Mapping[str, float], allowed: float = 0.0) -> Held:
    """Nodes whose errors move the outputs by no more than is allowed even where they are REACH times as large.

    levels: relative L2 at the deciders.
    """
    ranked = sorted(levels, key=levels.__getitem__)
    low, high, found = 0, len(ranked), Held()
    while low < high:  # the first `low` hold
        middle = (low + high + 1) // 2
        level = REACH * levels[ranked[middle - 1]]
        error = _worst(reruns, level, allowed)
        if error <= allowed:
            low, found = middle, Held(frozenset(ranked[:middle]), level, error)
        else:
            high = middle - 1
    return found


def _worst(reruns: Reruns, level: float, enough: float) -> float:
    """The largest error of the outputs over all draws, or the first beyond `enough`."""
    values = reruns.measurement.values
    names = deciders(reruns.measurement.capture)
    numbers = [x for name in names for x in tensors_of(values[name]) if is_number(x)]
    size = sum(x.numel() for x in numbers)
    square = sum(float(x.nan_to_num(0.0, 0.0, 0.0).double().square().sum()) for x in numbers)
    spread = level * (square / max(size, 1)) ** 0.5
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(DRAWS):
        found = reruns.disturbed({name: _beside(values[name], spread, generator) for name in names})
        worst = max(worst, found)
        if not found <= enough:
            return found
    return worst


def _beside(value: torch.Tensor, spread: float, generator: torch.Generator) -> torch.Tensor:
    return value + torch.randn(value.shape, generator=generator).to(value) * spread


def _read_last(capture: Capture) -> Sequence[fx.Node]:
    """Floating values met first on the ways back from the outputs."""
    names = set(capture.outputs)
    waiting = [node for node in capture.graph_module.graph.nodes if node.name in names]
    found: dict[fx.Node, None] = {}
    seen = set(waiting)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if _floating(source):
                found[source] = None
            elif source not in seen:
                seen.add(source)
                waiting.append(source)
    return tuple(found)


def _floating(n: fx.Node) -> bool:
    return any(x.is_floating_point() or x.is_complex() for x in tensors_of(n.meta.get("val")))
