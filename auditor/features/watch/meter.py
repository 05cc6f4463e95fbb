"""Reads the signals of one optimizer's updates, with one synchronization for each."""

from __future__ import annotations

import math
from typing import Any

import torch

from .before import Group
from .gradients import (
    EVERY,
    FIRST,
    Pair,
    Sample,
    flushed,
    gradients_of,
    is_finite,
    largest_pairs,
    norm_of,
    rate_of,
    read,
    sample,
)
from .signals import Signal
from .watched import Watched

Numbers = dict[str, list[float]]
"""Values that were read, by name."""


class Meter:
    """Measures the updates of the optimizer with this number. updates: their count until now."""

    def __init__(self, watched: Watched, number: int) -> None:
        self.updates = 0
        self._watched = watched
        self._number = number
        self._optimizer = watched.optimizers[number]
        self._sampled: Sample | None = None  # before the update that runs
        self._counts: dict[str, Pair] = {}  # of the last sample, not read yet

    @torch.no_grad()
    def before(self, step: int, group: Group) -> Signal:
        """Before an update, with the weights as they were."""
        optimizer = self._optimizer
        gradients = gradients_of(optimizer, not self._watched.is_sharded)
        own_scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which unscales itself
        skips = getattr(optimizer, "found_inf", None)
        scale = self._watched.scale(self._number)
        values = [("loss", x) for x in group.losses]
        values += [("returned", x) for x in group.returned]
        if gradients:
            norm = norm_of(gradients)
            values.append(("norm", norm if own_scale is None else norm / own_scale.to(norm.device)))
        if skips is not None:
            values.append(("skips", skips))
        if scale is not None:
            values.append(("scale", scale))
        if gradients and self.updates % EVERY == FIRST:
            self._sample(scale if own_scale is None else None)
        for name, (part, whole) in self._counts.items():
            values += [(f"{name} part", part), (f"{name} whole", whole)]
        self._counts = {}
        seen = read(values)
        return Signal(
            step=step,
            optimizer=self._number,
            loss=_loss(seen),
            norm=_norm(seen, gradients),
            scale=_first(seen, "scale"),
            rate=rate_of(optimizer),
            skipped=bool(_first(seen, "skips")),
            lost=_share(seen, "lost"),
            flushed=_share(seen, "flushed"),
        )

    def _sample(self, scale: torch.Tensor | None) -> None:
        pairs = largest_pairs(self._optimizer)
        if pairs:
            self._sampled = sample(pairs)
            self._counts["flushed"] = flushed(pairs, scale)

    @torch.no_grad()
    def _compare(self, sampled: Sample) -> None:
        """Compare the sampled weights with those before the update; the result is read at the next one."""
        lost = sampled.lost()
        if lost is not None:
            self._counts["lost"] = lost

    def after(self) -> None:
        """After an update."""
        if self._sampled is not None:
            self._compare(self._sampled)
            self._sampled = None
        self.updates += 1

    def skipped(self, step: int, group: Group) -> Signal:
        """A GradScaler did not call the optimizer: the weights are as they were."""
        values = [("loss", x) for x in group.losses]
        scale = self._watched.scale(self._number)
        if scale is not None:
            values.append(("scale", scale))
        seen = read(values)
        rate = rate_of(self._optimizer)
        return Signal(step, self._number, _loss(seen), None, _first(seen, "scale"), rate, True)


def _loss(seen: Numbers) -> float | None:
    """The sum over the backward passes; NaN if a call returned a loss that is not finite."""
    if not all(math.isfinite(x) for x in seen.get("returned", ())):
        return math.nan
    return sum(seen["loss"]) if "loss" in seen else None


def _norm(seen: Numbers, gradients: list[Any]) -> float | None:
    """The norm of the gradients; None if it overflows although they are finite."""
    norm = _first(seen, "norm")
    overflows = norm is not None and math.isinf(norm) and all(map(is_finite, gradients))
    return None if overflows else norm


def _share(seen: Numbers, name: str) -> float | None:
    """The quotient of two counts."""
    part = _first(seen, f"{name} part")
    whole = _first(seen, f"{name} whole")
    return None if part is None or whole is None else part / max(whole, 1.0)


def _first(seen: Numbers, name: str) -> float | None:
    return seen[name][0] if name in seen else None
