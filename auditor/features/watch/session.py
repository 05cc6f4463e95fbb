"""Runs the step of a capsule in every recipe, each in a forked process: a rehearsal of one step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ...errors import AuditorError
from ...isolation.process import swap_attribute
from ...training.blame import BACKWARD, WEIGHT, NonFiniteTrace, blame
from ..rehearsal.forked import call_forked
from ..rehearsal.result import FP32
from ..rehearsal.session import OUTERMOST, Search, Session
from ..rehearsal.trials import set_scales
from .capsule import Capsule
from .origin import Origin, OriginTrail
from .steps import CapsuleStep

CAUSE = "; cause: "
"""Separates the operation from the cause in a run's `where`."""
FLUSH = "underflow: gradients become zero"
"""The cause of gradients that become zero."""


@dataclass(frozen=True)
class Traced:
    """What one run of the step shows. trace: its Inf and NaN; first: the origin to blame; backward: the first operation whose
    gradients break; causes: {operation: why its result is not finite}; flushed: (operation, module) of gradients that
    become zero."""

    trace: NonFiniteTrace
    first: Origin | None
    backward: Origin | None
    causes: Mapping[str, str]
    flushed: tuple[tuple[str, str], ...]
    has_finite_loss: bool


class ReplaySession(Session):
    """The step of a capsule, with the user's model, optimizers and scalers in the capsule's state.

    scalers_of_capsule: the user's scalers in the order of the capsule's. finished: ids of optimizers that had updated
    their weights before the capsule was written, and do so no more.
    """

    calls_closures_once = True  # the recorder heard the gradients of the first call

    def __init__(self, step: CapsuleStep, capsule: Capsule, scalers: list[Any], finished: set[int]) -> None:
        self._capsule = capsule
        self._own_scalers = scalers
        self._finished = finished
        step.has_backward = lambda: bool(self._losses)
        super().__init__(step, self._one_batch, 0)

    def _one_batch(self) -> Iterator[tuple[int, Any]]:
        """The capsule's calls as the only batch. The scalers get their scales here, after a recipe was prepared."""
        scalers = self._own_scalers or self.scalers
        states = self._capsule.about.scalers
        for number, scaler in enumerate(scalers if states else ()):
            state = states[min(number, len(states) - 1)]
            if state.get("scale") is not None:
                set_scales([scaler], float(state["scale"]))
        yield 0, [one.batch for one in self._capsule.calls]

    def _update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        groups = optimizer.param_groups
        if id(optimizer) in self._finished:
            groups = [{**group, "params": []} for group in groups]
        with swap_attribute(optimizer, "param_groups", groups):
            yield from super()._update(optimizer, args, kwargs)

    def _search(self, search: Search, step: int, batch: Any) -> None:
        """The operation to blame, its cause, and its module, see `blame`. If FP32 fails too, the origin of its first NaN."""
        if step not in search.blamed:
            return
        with suppress(AuditorError):
            low = call_forked(partial(self._trace_origins, batch, True))
            fp32 = call_forked(partial(self._trace_origins, batch, False))
            search.blamed[step] = _culprit_of(low, fp32)

    def _trace_origins(self, batch: Any, is_low: bool, tell: object) -> Traced:
        """Run the step in the recipe or in FP32; returns where its Inf, NaN and underflow come from."""
        if not is_low:
            self._convert(FP32)
        trail = OriginTrail(self._module_now, OUTERMOST, self._name)
        loss = self._call_step(batch, trail)
        is_finite = math.isfinite(loss)
        return Traced(
            trace=trail.trace(self._loss_tensors, self._broken is None),
            first=trail.first(is_finite),
            backward=trail.backward,
            causes=trail.causes,
            flushed=tuple(trail.flushed),
            has_finite_loss=is_finite,
        )

    def search_underflow(self, tell: object) -> tuple[str, str | None]:
        """The first operation whose gradients become zero in the recipe as written, but not in FP32; ("", None) without
        one. Runs in the process of a recipe that was prepared."""
        ((_, batch),) = self._one_batch()
        low = call_forked(partial(self._trace_origins, batch, True))
        fp32 = call_forked(partial(self._trace_origins, batch, False))
        new = [one for one in low.flushed if one not in fp32.flushed]
        return (f"{new[0][0]}{CAUSE}{FLUSH}", new[0][1]) if new else ("", None)


def _culprit_of(low: Traced, fp32: Traced) -> tuple[str, str | None]:
    """The operation to blame with its cause, and its module; ("", None) without one."""
    is_broken_in_fp32 = not fp32.has_finite_loss or fp32.backward is not None
    if fp32.first is not None and is_broken_in_fp32:
        return f"{fp32.first.words}{CAUSE}{fp32.first.cause}", fp32.first.module
    words, module = blame(low.trace, fp32.trace)
    if low.backward is not None and (not words or words.startswith((BACKWARD, WEIGHT))):
        return f"{low.backward.words}{CAUSE}{low.backward.cause}", low.backward.module
    return f"{words}{CAUSE}{low.causes.get(words, '')}" if words else "", module


def zero_share(run: Any) -> dict[str, float]:
    """{parameter: share of its gradient that is zero} in a run of one step."""
    known = {name: series.zero_gradient for name, series in run.parameters.items()}
    return {name: values[-1] for name, values in known.items() if values and values[-1] is not None}


def is_stored_low(model: Any) -> bool:
    """Whether a parameter is stored in FP16 or BF16."""
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
