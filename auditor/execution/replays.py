"""Replays of one recorded graph under many policies: each computes only what differs from an earlier replay."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import offload
from ..numerics.entries import is_plain, tensors_in
from ..records import Capture
from .execute import Executor, Replay
from .policy import Policy

KEPT_RUNS = 2
"""Number of replays on the same inputs whose results are kept: as a rule the accepted choice, and the last one tried."""

KEPT_BYTES = 1 << 30
"""Largest size of all results that are kept; if there is not enough room for a replay, its first results are kept."""


@dataclass(frozen=True)
class _Run:
    """A replay whose results are kept. size: of its results, in bytes."""

    replay: Replay
    size: float


class Replays:
    """Replays recorded graphs under policies. The outputs are bit for bit those of a replay from the start."""

    def __init__(self) -> None:
        self._runs = dict[tuple[fx.GraphModule, Hashable], list[_Run]]()  # of one key, the last used comes last

    def outputs(self, key: Hashable, path: Capture, inputs: Sequence[Any], policy: Policy) -> Any:
        """The graph's output under a policy.

        key: identifies the values of the inputs. Raises: what an operation raises; then nothing of this replay is kept.
        """
        if not _is_kept(path, policy):
            return Executor(path.graph_module, policy).run(*inputs)
        runs = self._runs.setdefault((path.graph_module, key), [])
        before = self._nearest(path, runs, policy)
        del runs[: 1 - KEPT_RUNS]
        keeping = _Keeping(self._room(), inputs, before)
        result = None
        for n, result in Executor(path.graph_module, policy, before=before).steps(*inputs):
            keeping.note(n.name, result)
        runs.append(_Run(Replay(keeping.values, policy), keeping.size))
        return result

    def forget(self) -> None:
        """Free all results."""
        self._runs.clear()

    def _nearest(self, path: Capture, runs: list[_Run], policy: Policy) -> Replay | None:
        """The earlier replay after which the fewest nodes have to be computed; it then counts as the last used. None if
        that is every node."""
        computed = [len(_computed_again(path, run.replay, policy)) for run in runs]
        fewest = min(computed, default=math.inf)
        if fewest >= len(path.graph_module.graph.nodes):
            return None
        nearest = runs.pop(computed.index(min(computed)))
        runs.append(nearest)
        return nearest.replay

    def _room(self) -> float:
        """How many bytes of results may be kept of the next replay."""
        return KEPT_BYTES - sum(run.size for runs in self._runs.values() for run in runs)


def _is_kept(path: Capture, policy: Policy) -> bool:
    """Whether results are kept: not under a limit on memory; nor if several paths were recorded, since a policy compares
    the nodes of all paths together."""
    return policy.capture is path and offload.now() is None


def _computed_again(path: Capture, run: Replay, policy: Policy) -> set[str]:
    """Names of the nodes that a policy computes differently than an earlier replay, or whose inputs may differ."""
    changed = {*policy.differing_nodes(run.semantics)}
    for n in path.graph_module.graph.nodes:
        if n.name not in run.values or any(source.name in changed for source in n.all_input_nodes):
            changed.add(n.name)
    return changed


class _Keeping:
    """The results of one replay that are kept. A result that no step computes again comes from the replay `before`.

    values: {node: result}. size: bytes of all results, at most `room`; a view counts as a copy, an input does not count.
    """

    def __init__(self, room: float, inputs: Sequence[Any], before: Replay | None) -> None:
        self._room = room
        self._inputs = {x.data_ptr() for x in tensors_in([*inputs]) if is_plain(x)}
        self.values = dict[str, Any]()
        self.size = 0.0
        for name, result in before.values.items() if before is not None else ():
            self.note(name, result)

    def note(self, name: str, result: Any) -> None:
        """Keep a node's new result in place of an earlier one, if there is room."""
        earlier = self.values.pop(name, None)
        self.size -= self._bytes(earlier)
        size = self._bytes(result)
        if self.size + size <= self._room:
            self.size += size
            self.values[name] = result

    def _bytes(self, result: Any) -> float:
        return sum(map(self._bytes_of, tensors_in(result)))

    def _bytes_of(self, x: torch.Tensor) -> float:
        if not is_plain(x):
            return math.inf  # sparse and nested results are not kept
        return 0.0 if x.data_ptr() in self._inputs else float(x.nbytes)
