"""The rest of a tape run again once values of it are others: only as far as the change reaches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..numerics.casting import raised
from ..numerics.nodes import tensors_of
from ..pulse import beat
from ..records import Capture
from .choices import differing, is_choice, provoked
from .execute import Disturbed, Executor, Policy, Run, SomeLow, ValueOf


@dataclass(frozen=True)
class Followed:
    """What became of the outputs. flipped: whether a discrete result on the way, or among them, is another. left: what low
    operations gave to others, by name."""

    outputs: list[torch.Tensor]
    flipped: bool
    left: Mapping[str, Any]


class Rest:
    """The outputs of a capture once some of its values are others, all else being FP32.

    values: what every node and placeholder gave in FP32. executed: how many operations were run so far.
    """

    def __init__(self, capture: Capture, flat: Sequence[Any], values: Mapping[str, Any]) -> None:
        self._capture, self._flat, self._reference = capture, flat, Run(values)
        self._operations: int = sum(node.op == "call_function" for node in capture.graph_module.graph.nodes)
        self.executed = 0

    @property
    def replays(self) -> float:
        """Runs of the whole capture that cost as many operations as were run so far."""
        return self.executed / max(self._operations, 1)

    def outputs(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among the model's outputs once the values of some nodes are others.

        Raises: what an operation raises that cannot take them.
        """
        return self._follow(Disturbed(values), values).outputs

    def together(
        self, names: Collection[str], format: str, round: Callable[[Any], Any], *, provoke: bool = False
    ) -> Followed:
        """The outputs with all these operations low at once, on what reaches them; see SomeLow.

        provoke: a choice on the way is another already where it would be with somewhat other errors, see choices.py.
        Raises: UnsupportedInFormat, and what an operation raises.
        """
        provoked = self._reference.values if provoke else {}
        return self._follow(_Provoked(self._capture, set(names), format, round, provoked), names)

    def _follow(self, policy: Policy, changed: Collection[str]) -> Followed:
        beat()
        reference, flipped = self._reference.values, False
        executor = Executor(self._capture.graph_module, policy, before=self._reference)
        result = None
        with torch.no_grad():
            for n, result in executor.steps(*self._flat):
                if n.op != "call_function" or (isinstance(policy, Disturbed) and n.name in changed):
                    continue
                self.executed += 1
                if n.name in reference and is_choice(n, reference[n.name]):
                    flipped = flipped or differing(raised(result), reference[n.name], n) > 0
        left = policy.left if isinstance(policy, SomeLow) else {}
        return Followed(tensors_of(raised(result)), flipped, {n.name: value for n, value in left.items()})


class _Provoked(SomeLow):
    """Some operations low; with choices that somewhat other errors would make. reference: values in FP32, of those choices."""

    def __init__(
        self,
        capture: Capture,
        inside: Collection[str],
        format: str,
        round: Callable[[Any], Any],
        reference: Mapping[str, Any],
    ) -> None:
        super().__init__(capture, inside, format, round)
        self._reference = reference

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """What the node gives, or what it chooses with other errors."""
        result = super().compute(n, value_of)
        if n.name not in self._reference or not is_choice(n, self._reference[n.name]):
            return result
        now = self.arriving(n, value_of)
        return provoked(
            n,
            result,
            self._reference[n.name],
            lambda source: self._reference[source.name],
            lambda source: raised(now(source)),
        )
