"""The same training step on parts of a batch: how the range and the error of gradients move with its size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..execution.step import Step, bind_step, gradient_error, run_step
from ..numerics.formats import FORMATS
from ..numerics.histogram import flushed, largest_scale, magnitudes_of, merged, significant
from ..raised import let_through
from ..records import Batch, Magnitudes, Objective, Subject
from ..records.training import BatchSize
from .own import Lowering, own_step, settle
from .step import LOSS, capture_step, step_batches, with_literals_of

HALVINGS, PARTS = 2, 2
"""How often the batch is halved, and how many parts of one size are run at most."""


def batch_sizes(
    subject: Subject, whole: Step, errors: Mapping[str, float | None], lowerings: Mapping[str, Lowering]
) -> tuple[BatchSize, ...]:
    """Quarters, halves and all of the first batch, two parts of one size averaged; all of it alone where it cannot be cut.

    The sizes of gradients and errors are root mean squares over the parts, the largest gradient is that of any part.
    """
    total = _samples(subject.batches[0])
    if total is None:
        return ()
    found = [_row(total, [whole], [errors])]
    for halving in range(1, HALVINGS + 1):
        count = total >> halving
        steps = _steps(subject, whole, total, count) if count else []
        if not steps:
            break
        found.append(_row(count, steps, [{f: _error(step, low) for f, low in lowerings.items()} for step in steps]))
    return tuple(reversed(found))


def _row(samples: int, steps: Sequence[Step], errors: Sequence[Mapping[str, float | None]]) -> BatchSize:
    pool = merged(_inner(step) for step in steps)
    norms = [merged(magnitudes_of(g) for g in step.by_parameter.values()).norm for step in steps]
    known = {fmt: [row[fmt] for row in errors] for fmt in errors[0]}
    return BatchSize(
        samples,
        pool.max_abs,
        _rms(norms),
        flushed(pool.exponents, FORMATS["fp16"]),
        {fmt: None if None in found else _rms([e for e in found if e is not None]) for fmt, found in known.items()},
    )


def _inner(step: Step) -> Magnitudes:
    """Gradients inside the model, and of its weights; the loss's own, which is 1, is left out."""
    return merged(
        significant(magnitudes_of(g))
        for name, gradients in step.gradients.items()
        for g in gradients
        if g is not None and (name not in step.capture.nodes or step.capture.nodes[name].owner != LOSS)
    )


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _steps(subject: Subject, whole: Step, total: int, count: int) -> list[Step]:
    try:
        captured = capture_step(_part(subject, total, slice(0, count)), (), whole.seed)
        if list(captured.nodes) != list(whole.capture.nodes):
            return []
        captured = with_literals_of(captured, whole.capture)
        starts = range(0, total - count + 1, count)
        kept = list(starts)[: PARTS if captured.method == "run" else 1]
        parts = [_part(subject, total, slice(start, start + count)) for start in kept]
        return [settle(run_step(bind_step(captured, part, step_batches(part)[0], whole.seed))) for part in parts]
    except Exception as error:
        let_through(error)
        return []  # a model may insist on its batch size


def _error(step: Step, low: Lowering) -> float | None:
    scale = min(largest_scale(_inner(step), FORMATS["fp16"]) / 16, 2.0**24) if FORMATS[low.format].loss_scaling else 1.0
    found = own_step(step, low, scale)
    return None if found.failure is not None else gradient_error(step.by_parameter, found.gradients)


def _samples(batch: Batch) -> int | None:
    sizes = {x.shape[0] for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _part(subject: Subject, total: int, rows: slice) -> Subject:
    def cut(tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda x: x[rows] if x.dim() and x.shape[0] == total else x, tree)

    assert subject.objective is not None
    objective = Objective(subject.objective.loss_fn, (cut(subject.objective.targets[0]),), subject.objective.source)
    return replace(subject, batches=(cut(subject.batches[0]),), held_out=(), objective=objective)
