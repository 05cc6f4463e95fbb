"""A subject with the first half of the samples in each of its batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..devices import CPU
from ..formats.metrics import output_error
from ..isolation import isolated
from ..isolation.answer import answer
from ..isolation.process import ieee
from ..raised import let_through
from ..records import Batch, Subject
from ..recursion import deep
from ..trees import tensors_in
from .placement import placed
from .state import in_eval
from .stored import raised

ALIKE = 1e-3
"""Relative L2 up to which outputs of a sample are the same, whatever is beside it: sums in another order, and no more."""


def samples(subject: Subject) -> int:
    """How many the first batch holds: rows of its first input that has any; 0 where none has."""
    return _rows(subject.batches[0])


def halved(subject: Subject, seed: int) -> Subject | None:
    """The subject with half of its samples; None where there is one alone, or one tells on another's outputs."""
    total = samples(subject)
    if total < 2:
        return None
    half = replace(subject, batches=tuple(map(_half, subject.batches)), held_out=tuple(map(_half, subject.held_out)))
    objective = subject.objective
    if objective is not None:
        pairs = zip(subject.batches, objective.targets, strict=True)
        half = replace(half, objective=replace(objective, targets=tuple(_cut(t, _rows(b)) for b, t in pairs)))
    return half if _independent(subject, total, seed) else None


def _rows(batch: Batch) -> int:
    return next((x.shape[0] for x in tensors_in(batch) if x.dim() and not x.is_nested), 0)


def _half(batch: Batch) -> Batch:
    result: Batch = _cut(batch, _rows(batch))
    return result


def _cut(tree: Any, total: int) -> Any:
    def cut(x: torch.Tensor) -> torch.Tensor:
        return x[: total // 2] if x.dim() and x.shape[0] == total else x

    return pytree.tree_map_only(torch.Tensor, cut, tree) if total > 1 else tree


def _independent(whole: Subject, total: int, seed: int) -> bool:
    """Whether the first half of the model's FP32 outputs, run on the CPU, is what it gives for that half alone."""
    whole = placed(whole, CPU)
    with deep(), ieee(), isolated(seed=seed), torch.inference_mode(False), in_eval(whole.model), raised(whole):
        try:
            first = whole.batches[0]
            every, fewer = (answer(whole.model, batch, seed=seed) for batch in (first, _half(first)))
        except Exception as error:  # a model may insist on its batch size
            let_through(error)
            return False
    if len(every) != len(fewer):
        return False
    rows = [(a, b) for a, b in zip(every, fewer, strict=True) if a.dim() and a.shape[0] == total]
    alike = all(b.shape == a[: total // 2].shape for a, b in rows)
    return bool(rows) and alike and output_error([a[: total // 2] for a, _ in rows], [b for _, b in rows]) <= ALIKE
