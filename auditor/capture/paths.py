"""Determines for which batches a recorded graph is valid; traverses graphs; matches the operations of two graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..errors import let_through
from ..isolation.run_model import from_the_start
from ..numerics.entries import entries, extent, places
from ..numerics.nodes import op_name, row_of, tensors_in
from ..records import Batch, Capture, ModelPath, Subject
from .builder import Recording
from .record import record

H = TypeVar("H", bound=Hashable)
S = TypeVar("S")
T = TypeVar("T")


def key_of(batch: Batch) -> tuple[int, ...]:
    """A key that identifies a batch: the ids of its tensors."""
    return tuple(id(x) for x in tensors_in(batch))


def on_the_path(recording: Recording, subject: Subject, seed: int) -> frozenset[tuple[int, ...]]:
    """Keys (see `key_of`) of the other batches, held-out ones included, whose run has the shapes, operations and
    constants of the recorded run."""
    first, *others = (*subject.batches, *subject.held_out)
    result = set[tuple[int, ...]]()
    for batch in (batch for batch in others if _shapes(batch) == _shapes(first)):
        try:
            other, _ = from_the_start(subject.model, batch, partial(record, subject.model, batch), seed)
        except Exception as error:  # a branch that fails on these inputs is another path
            let_through(error)
            continue
        constants = ((x, other.constants.get(name)) for name, x in recording.constants.items())
        same = _operations_of(recording) == _operations_of(other)
        if same and all(y is not None and _equal(x, y) for x, y in constants):
            result.add(key_of(batch))
    return frozenset(result)


def usable(capture: Capture, subject: Subject, batches: Sequence[Batch] | None = None) -> list[Batch]:
    """The batches whose path through the model was recorded. batches: by default the calibration inputs."""
    chosen = subject.batches if batches is None else batches
    return [batch for batch in chosen if path_of(capture, subject, batch) is not None]


def path_of(capture: Capture, subject: Subject, batch: Batch) -> Capture | None:
    """The Capture of the path that a batch takes; None if that path is not recorded."""
    for path in capture.paths or (ModelPath(capture, subject.batches),):
        first, result = path.batches[0], path.capture
        known = result.method == "run" or key_of(batch) == key_of(first) or key_of(batch) in result.same_path
        if known and _shapes(batch) == _shapes(first):
            return result
    return None


def _shapes(batch: Batch) -> str:
    leaves, spec = pytree.tree_flatten(batch)
    return str((spec, [(extent(x), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]))


def _operations_of(recording: Recording) -> list[Any]:
    return [
        (node.name, op_name(node.target), fx.node.map_arg((node.args, node.kwargs), lambda read: read.name))
        for node in recording.graph.nodes
    ]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (extent(a), a.dtype) != (extent(b), b.dtype):
        return False
    parts = zip((*places(a), entries(a)), (*places(b), entries(b)), strict=True)
    return all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in parts)


def reach(starts: Iterable[H], following: Callable[[H], Iterable[H]]) -> list[H]:
    """`starts` and all items reached from them through `following` (item -> its successors), each once."""
    waiting, result = list(starts), dict[H, None]()
    while waiting:
        item = waiting.pop()
        if item not in result:
            result[item] = None
            waiting += following(item)
    return list(result)


def align(ours: Iterable[tuple[str, Hashable, S]], theirs: Iterable[tuple[str, Hashable, T]]) -> Iterator[tuple[S, T]]:
    """Yield pairs of items of two runs that match: items of one module with equal keys, in the same order. ours,
    theirs: (module, key, item)."""
    others = _by_module(theirs)
    for module, (keys, items) in _by_module(ours).items():
        their_keys, their_items = others.get(module, ([], []))
        if keys == their_keys:  # the usual case; the general case takes quadratic time
            yield from zip(items, their_items, strict=True)
            continue
        for a, b, size in SequenceMatcher(None, keys, their_keys, autojunk=False).get_matching_blocks():
            yield from zip(items[a : a + size], their_items[b : b + size], strict=True)


def same_operations(ours: Capture, theirs: Capture) -> dict[str, str]:
    """{operation of one graph: the same operation in the other}, matched by module, name and source line."""
    return dict(align(_operations(ours), _operations(theirs)))


def _operations(capture: Capture) -> Iterator[tuple[str, Hashable, str]]:
    for node in capture.graph_module.graph.nodes:
        if node.op == "call_function":
            row, described = row_of(node), capture.nodes[node.name]
            yield described.owner, ("batch_norm" if row.batch_norm else row.name, described.source), node.name


def _by_module(items: Iterable[tuple[str, Hashable, T]]) -> dict[str, tuple[list[Hashable], list[T]]]:
    result: dict[str, tuple[list[Hashable], list[T]]] = {}
    for module, key, item in items:
        keys, values = result.setdefault(module, ([], []))
        keys.append(key)
        values.append(item)
    return result
