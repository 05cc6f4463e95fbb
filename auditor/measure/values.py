"""FP32 results of a measured graph: stored, or freed and computed again when read, if autograd does not keep them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from ..execution.execute import RECORDED
from ..numerics.entries import is_plain
from ..numerics.nodes import is_torchs_own, row_of, target_of, view_source
from .reference import batch_norm

IN_A_ROW = 2
"""Maximum number of operations in a row that run again to recompute a released result."""

Listener = Callable[[torch.Tensor | None], None]
"""Function that receives a value's gradient in each backward pass, or None if the pass does not reach the value."""


class GradientPlace(NamedTuple):
    """A tensor with a gradient. name: the node, or see `reading`; source: the node that computes it; number: index of
    the tensor in the node's result."""

    name: str
    source: str
    number: int


def reading(product: str, source: str) -> str:
    """Name of the copy of a shared value that only the product `product` reads."""
    return f"{product} reads {source}"


class Values(Mapping[str, Any]):
    """Detached FP32 results of nodes and placeholders, by name. Released results are computed again when read."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = {n.name: n for n in graph.nodes}
        self._stored: dict[str, Any] = {}
        self._released, self._needed = dict[str, int](), set[str]()  # {name: operations in a row that compute it again}

    def keep(self, n: fx.Node, value: Any) -> None:
        """Store the result `value` of a node."""
        self._stored[n.name] = value

    def release(self, n: fx.Node, saved: Collection[int]) -> None:
        """Free a result if at most IN_A_ROW cheap operations compute it again from stored results. saved: addresses of
        the storages that autograd keeps."""
        value, sources = self._stored.get(n.name), [source.name for source in n.all_input_nodes]
        if n.name in self._needed or not sources or not isinstance(value, torch.Tensor) or not _repeatable(n):
            return
        is_kept = not is_plain(value) or value.untyped_storage().data_ptr() in saved
        depth = 1 + max(self._released.get(source, 0) for source in sources)
        if not is_kept and depth <= IN_A_ROW and all(source in self for source in sources):
            del self._stored[n.name]
            self._released[n.name] = depth
            self._needed.update(sources)

    def __getitem__(self, name: str) -> Any:
        if name not in self._released:
            return self._stored[name]
        n = self._nodes[name]
        with torch.no_grad():
            if row_of(n).normalizes == "statistics":  # the operation itself would update the running statistics
                args, _ = fx.node.map_arg((n.args, n.kwargs), lambda source: self[source.name])
                return batch_norm(target_of(n), *args)
            return RECORDED.compute(n, lambda source: self[source.name])

    def __contains__(self, name: object) -> bool:
        return name in self._stored or name in self._released

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._nodes if name in self)

    def __len__(self) -> int:
        return len(self._stored) + len(self._released)


def _repeatable(n: fx.Node) -> bool:
    """Whether an operation is cheap and deterministic, so that its result may be computed again."""
    target, row = target_of(n), row_of(n)
    dear = row.product or row.recurrent or row.cell or row.thins or view_source(n) is not None
    return (
        n.op == "call_function"
        and not dear
        and isinstance(target, torch._ops.OpOverload)
        and is_torchs_own(target)
        and torch.Tag.nondeterministic_seeded not in target.tags
    )
