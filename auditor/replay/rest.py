"""The rest of a tape run again once values of it are others: only as far as the change reaches."""

from __future__ import annotations

import heapq
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ..formats.entries import entries, is_plain
from ..ops.casting import raised
from ..ops.nodes import tensors_of
from ..pulse import beat
from ..records import Capture
from .choices import differing, is_choice, provoked
from .execute import PartlyLow, Replay


@dataclass(frozen=True)
class Followed:
    """What became of the outputs. flipped: whether a discrete result on the way, or among them, is another."""

    outputs: list[torch.Tensor]
    flipped: bool


class Rest:
    """The outputs of a capture once some of its values are others, all else being FP32.

    values: what every node and placeholder gave in FP32. An operation is run again if something it reads is no longer
    equal, bit for bit; what an operation absorbs is followed no further. executed: how many were run so far.
    """

    def __init__(self, capture: Capture, flat: Sequence[Any], values: Mapping[str, Any]) -> None:
        self._capture = capture
        self._nodes = {node.name: node for node in capture.graph_module.graph.nodes}
        self._order = list(self._nodes.values())
        self._place = {node: i for i, node in enumerate(self._order)}
        places = (node for node in self._order if node.op == "placeholder")
        self._reference = _ByNode(self._nodes, values, dict(zip(places, flat, strict=False)))
        self._operations: int = sum(node.op == "call_function" for node in self._order)
        self._unknown = [n for n in self._order if n not in self._reference and n.op != "output"]
        self.executed = 0

    @property
    def replays(self) -> float:
        """Runs of the whole capture that cost as many operations as were run so far."""
        return self.executed / max(self._operations, 1)

    def outputs(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among the model's outputs once the values of some nodes are others.

        Raises: what an operation raises that cannot take them.
        """
        given = {self._nodes[name]: value for name, value in values.items()}
        return self._follow(Replay(self._capture, keep=True), given, ()).outputs

    def together(
        self, names: Collection[str], format: str, round: Callable[[Any], Any], *, provoke: bool = False
    ) -> Followed:
        """The outputs with all these operations low at once, on what reaches them; see PartlyLow.

        provoke: a choice on the way is another already where it would be with somewhat other errors, see choices.py.
        Raises: UnsupportedInFormat, and what an operation raises.
        """
        run = PartlyLow(self._capture, set(names), format, round)
        return self._follow(run, {}, [self._nodes[name] for name in names], run.reading if provoke else None)

    def _follow(
        self,
        run: Replay,
        given: Mapping[fx.Node, Any],
        low: Collection[fx.Node],
        reading: Callable[[fx.Node], Callable[[fx.Node], Any]] | None = None,
    ) -> Followed:
        beat()
        run.env = cast("dict[fx.Node, Any]", ChainMap(dict(given), cast("dict[fx.Node, Any]", self._reference)))
        started, flipped = {*low, *self._unknown}, False
        waiting = [self._place[node] for node in {*started, *(user for node in given for user in node.users)}]
        heapq.heapify(waiting)
        queued = set(waiting)
        with torch.no_grad():
            while waiting:
                node = self._order[heapq.heappop(waiting)]
                if node.op == "output" or node in given:
                    continue
                result = run.run_node(node)
                self.executed += 1
                choice = node in self._reference and is_choice(node, self._reference[node])
                if choice and reading is not None:
                    result = self._provoked(node, result, reading(node))
                left = raised(result) if node in started else result
                same = node in self._reference and _same(left, self._reference[node])
                flipped = flipped or (choice and not same and differing(left, self._reference[node], node) > 0)
                if same and node not in started:
                    continue
                run.env[node] = result
                for user in node.users:
                    if self._place[user] not in queued:
                        queued.add(self._place[user])
                        heapq.heappush(waiting, self._place[user])
        leaves = [raised(run.env[self._nodes[name]]) for name in self._capture.outputs]
        return Followed([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], flipped)

    def _provoked(self, node: fx.Node, result: Any, read: Callable[[fx.Node], Any]) -> Any:
        return provoked(
            node, result, self._reference[node], self._reference.__getitem__, lambda source: raised(read(source))
        )


class _ByNode(Mapping[fx.Node, Any]):
    """Results by name, asked for by node, one at a time: they may have to be fetched. others: of nodes without one."""

    def __init__(self, nodes: Mapping[str, fx.Node], values: Mapping[str, Any], others: Mapping[fx.Node, Any]) -> None:
        self._values, self._others = values, others
        self._known = dict.fromkeys([*others, *(node for name, node in nodes.items() if name in values)])

    def __getitem__(self, node: fx.Node) -> Any:
        return self._values[node.name] if node.name in self._values else self._others[node]

    def __contains__(self, node: object) -> bool:
        return node in self._known

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _same(a: Any, b: Any) -> bool:
    """Whether two results have equal tensors; what else they may hold counts as different."""
    if type(a) is type(b) is torch.Tensor and a.dtype is b.dtype is torch.float32 and is_plain(a) and is_plain(b):
        return a.shape == b.shape and torch.equal(a, b)  # what nearly all results are
    ours, theirs = tensors_of(a), tensors_of(b)
    return (
        bool(ours)
        and len(ours) == len(theirs)
        and all(
            x.dtype == y.dtype
            and is_plain(x)
            and is_plain(y)
            and x.shape == y.shape
            and torch.equal(entries(x), entries(y))
            for x, y in zip(ours, theirs, strict=True)
        )
    )
