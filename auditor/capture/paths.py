"""Which batches a tape holds for: of the recorded shapes, and on its path where Python chose that by looking at values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..isolation.answer import from_the_start
from ..numerics.entries import entries, extent, places
from ..numerics.nodes import op_name, tensors_of
from ..raised import let_through
from ..records import Batch, Capture, ModelPath, Subject
from .builder import Tape
from .record import record


def key_of(batch: Batch) -> tuple[int, ...]:
    """What tells a batch from others: the tensors in it."""
    return tuple(id(x) for x in tensors_of(batch))


def on_the_path(tape: Tape, model: nn.Module, batches: Sequence[Batch], seed: int) -> frozenset[tuple[int, ...]]:
    """Keys of those batches whose run does the same operations, with the same numbers in them: each is run once."""
    return frozenset(key_of(batch) for batch in batches if _takes_it(tape, model, batch, seed))


def of_shapes(first: Batch, batches: Sequence[Batch]) -> list[Batch]:
    """Those of some batches whose tensors have the shapes of the first, and whose other arguments are the same."""
    return [batch for batch in batches if _shapes(batch) == _shapes(first)]


def usable_batches(capture: Capture, subject: Subject) -> list[Batch]:
    """Audited batches that the captured graph is valid for."""
    return usable(capture, subject, subject.batches)


def usable(capture: Capture, subject: Subject, batches: Sequence[Batch]) -> list[Batch]:
    """Those of some batches that the captured graph is valid for: of a recorded batch's shapes, and on its path."""
    return [batch for batch in batches if path_of(capture, subject, batch) is not None]


def path_of(capture: Capture, subject: Subject, batch: Batch) -> Capture | None:
    """The recorded path that a batch takes; None where it takes another."""
    for path in capture.paths or (ModelPath(capture, subject.batches),):
        first, found = path.batches[0], path.capture
        known = found.method == "run" or key_of(batch) == key_of(first) or key_of(batch) in found.same_path
        if known and _shapes(batch) == _shapes(first):
            return found
    return None


def _shapes(batch: Batch) -> str:
    leaves, spec = pytree.tree_flatten(batch)
    return str((spec, [(extent(x), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]))


def _takes_it(tape: Tape, model: nn.Module, batch: Batch, seed: int) -> bool:
    try:
        other, _ = from_the_start(model, batch, lambda: record(model, batch), seed)
    except Exception as error:  # a branch that fails on these inputs is another path
        let_through(error)
        return False
    return _written(tape) == _written(other) and all(
        name in other.constants and _equal(x, other.constants[name]) for name, x in tape.constants.items()
    )


def _written(tape: Tape) -> list[Any]:
    def name(node: fx.Node) -> str:
        return node.name

    return [
        (node.name, op_name(node.target), fx.node.map_arg((node.args, node.kwargs), name)) for node in tape.graph.nodes
    ]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b or (extent(a), a.dtype) != (extent(b), b.dtype):
        return a is b
    spots, (a, b) = zip(places(a), places(b), strict=True), (entries(a), entries(b))
    return bool(((a == b) | (a != a) & (b != b)).all()) and all(torch.equal(*pair) for pair in spots)
