"""A run of the tape that differs from another one in few places: what comes before the first of them is not run again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .. import mapped
from ..ops.nodes import target_of
from ..records import Capture
from .execute import Observe, PartlyLow, PolicyInterpreter, Replay, in_fp32
from .held import Held, goes
from .running import FULL, Running

Values = Mapping[fx.Node, Any]


@dataclass(frozen=True)
class Run:
    """Values of a run on some inputs. how: what it ran under."""

    values: Values
    how: Running = FULL


def kept(capture: Capture, inputs: Sequence[Any]) -> Run:
    """A run of everything as it was recorded whose values are kept, but for what takes little to be computed again."""
    if mapped.now() is None:
        run = _Keeping(capture)
        run.run(*inputs)
        return Run(run.values)
    values: dict[fx.Node, Any] = {}
    Replay(capture, values.__setitem__).run(*inputs)
    return Run(values)


def begun(capture: Capture, inputs: Sequence[Any], how: Running) -> tuple[Any, Run]:
    """What a run under a policy gives, and what is kept of it for others on the same inputs."""
    values: dict[fx.Node, Any] = {}

    def keep(n: fx.Node, result: Any) -> None:
        values[n] = result

    return PolicyInterpreter(capture, how, keep).run(*inputs), Run(values, how)


class _Keeping(Replay):
    """A run in FP32 whose values are kept, or can be computed again."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture)
        self.values = Held[fx.Node](_in_fp32)

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = result = super().run_node(n)
        if n.op == "call_function":
            goes(self.values, n, n, result, {source: self.values[source] for source in n.all_input_nodes})
            for source in self.user_to_last_uses.get(n, ()):
                self.values.give_up(source)
        return result


def _in_fp32(n: fx.Node, values: Values) -> Any:
    given: Any = fx.node.map_arg((n.args, n.kwargs), values.__getitem__)
    return in_fp32(target_of(n), *given)


class PolicyAgain(PolicyInterpreter):
    """A run under a policy, on the inputs of a kept one. changed: nodes whose results differ from what they were there."""

    def __init__(self, capture: Capture, how: Running, before: Run) -> None:
        super().__init__(capture, how)
        self._before = before
        self.changed = differing(capture, how, before.how)
        self._computed: set[fx.Node] = set()
        waiting = [*self.changed, *capture.graph_module.graph.find_nodes(op="output")]
        while waiting:
            n = waiting.pop()
            if n not in self._computed and not self._is_kept(n):
                self._computed.add(n)
                waiting += n.all_input_nodes

    def run_node(self, n: fx.Node) -> Any:
        """Result of one node; the kept one where nothing about it differs, and none where nobody reads it."""
        if n in self._computed:
            return super().run_node(n)
        if n.op == "placeholder":
            next(self.args_iter)
        is_read = n.op == "output" or not self._computed.isdisjoint(n.users)
        return self._before.values[n] if is_read else None

    def _is_kept(self, n: fx.Node) -> bool:
        return n not in self.changed and n in self._before.values


def differing(capture: Capture, now: Running, then: Running) -> set[fx.Node]:
    """Nodes that come to something else under one policy than under another, on the same inputs."""
    paths = now.wrapping.otherwise(then.wrapping) if now.wrapping else None
    touched = None
    if paths is not None:
        touched = {name for name, n in capture.nodes.items() if any(call.path in paths for call in n.calls)}
    found: set[fx.Node] = set()
    for n in capture.graph_module.graph.nodes:
        if not found.isdisjoint(n.all_input_nodes) or not _alike(capture, n, now, then, touched):
            found.add(n)
    return found


def _alike(capture: Capture, n: fx.Node, now: Running, then: Running, touched: Collection[str] | None) -> bool:
    """Whether both policies do the same at a node. touched: operations where they may not; None where any may be one."""
    if n.op == "placeholder":
        return then.placeholder_precision.get(n.name) == now.placeholder_precision.get(n.name)
    if n.op not in ("call_function", "output"):
        return True
    if touched is not None and not any(name in touched for name in (n.name, *(s.name for s in n.all_input_nodes))):
        return True
    if any(then.crossing(s.name, n.name) != now.crossing(s.name, n.name) for s in n.all_input_nodes):
        return False
    return n.op == "output" or _casts(capture, n, then) == _casts(capture, n, now)


def _casts(capture: Capture, n: fx.Node, how: Running) -> tuple[str, str, int]:
    """What a policy does at an operation, as far as it matters there."""
    casts = how.casts(capture.nodes[n.name])
    return casts.autocast, casts.precision if casts.autocast != "none" else "", id(casts.literals)


class PartlyLowAgain(PartlyLow):
    """Some operations low, on the inputs of a kept run of everything in FP32: what they do not reach is taken from there.

    changed: nodes that are run, and not taken from there.
    """

    def __init__(
        self,
        capture: Capture,
        inside: Collection[str],
        format: str,
        round: Callable[[Any], Any],
        before: Run,
        observe: Observe | None = None,
    ) -> None:
        super().__init__(capture, inside, format, round, observe)
        self._before = before
        self.changed: set[fx.Node] = set()
        for n in capture.graph_module.graph.nodes:
            if n.name in inside or not self.changed.isdisjoint(n.all_input_nodes):
                self.changed.add(n)

    def run_node(self, n: fx.Node) -> Any:
        """Result of one node; the kept one where no low operation reaches it."""
        if n in self.changed:
            return super().run_node(n)
        is_read = n.op in ("placeholder", "output") or not self.changed.isdisjoint(n.users)
        return _taken(self, n, self._before) if is_read else None


def _taken(run: Replay, n: fx.Node, before: Run) -> Any:
    if n.op == "placeholder":
        next(run.args_iter)
    return before.values[n]
