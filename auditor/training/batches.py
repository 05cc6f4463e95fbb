"""The same training step on parts of a batch: how the range and the error of gradients move with its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..numerics.formats import FORMATS
from ..records import Batch, Objective, Subject
from .emulate import Emulator, Precision, gradient_error, low_step
from .gradients import Step, bind_step, capture_step, run_step
from .objective import step_batches
from .records import BatchSize
from .spreads import flushed, largest_scale, merged, spread_of

HALVINGS = 2


def batch_sizes(
    subject: Subject, whole: Step, errors: Mapping[str, float | None], precisions: Mapping[str, Precision], seed: int
) -> tuple[BatchSize, ...]:
    """A quarter, half and all of the first batch; all of it alone where the batch cannot be cut."""
    total = _samples(subject.batches[0])
    if total is None:
        return ()
    found = [_row(total, whole, errors)]
    for halving in range(1, HALVINGS + 1):
        count = total >> halving
        part = _part(subject, total, count) if count else None
        step = _step(part, tuple(precisions), seed) if part is not None else None
        if step is None:
            break
        found.append(_row(count, step, {fmt: _error(step, fmt, precision) for fmt, precision in precisions.items()}))
    return tuple(reversed(found))


def _row(samples: int, step: Step, errors: Mapping[str, float | None]) -> BatchSize:
    pool = merged(spread_of(g) for gradients in step.gradients.values() for g in gradients if g is not None)
    parameters = merged(spread_of(g) for g in step.by_parameter.values())
    return BatchSize(samples, pool.max_abs, parameters.norm, flushed(pool.exponents, FORMATS["fp16"]), dict(errors))


def _step(subject: Subject, formats: tuple[str, ...], seed: int) -> Step | None:
    try:
        captured = capture_step(subject, formats)
        return run_step(bind_step(captured, subject.model, step_batches(subject)[0], seed))
    except (CaptureError, RuntimeError, ValueError):
        return None  # a model may insist on its batch size


def _error(step: Step, fmt: str, precision_of: Precision) -> float | None:
    pool = merged(spread_of(g) for gradients in step.gradients.values() for g in gradients if g is not None)
    scale = min(largest_scale(pool, FORMATS["fp16"]) / 16, 2.0**24) if fmt == "fp16" else 1.0
    low = low_step(Emulator(step.capture, "autocast", fmt, precision_of), step.flat, step.parameters, scale, step.seed)
    return None if low.failure is not None else gradient_error(step.by_parameter, low.gradients)


def _samples(batch: Batch) -> int | None:
    sizes = {x.shape[0] for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _part(subject: Subject, total: int, count: int) -> Subject:
    def cut(tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda x: x[:count] if x.dim() and x.shape[0] == total else x, tree)

    assert subject.objective is not None
    objective = Objective(subject.objective.loss_fn, (cut(subject.objective.targets[0]),), subject.objective.source)
    return replace(subject, batches=(cut(subject.batches[0]),), held_out=(), objective=objective)
