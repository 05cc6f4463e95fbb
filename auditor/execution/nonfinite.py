"""The first operation of a low run that turns non-finite, and the operation upstream at which the cause begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..numerics.casting import raised
from ..numerics.entries import entries, is_plain
from ..numerics.formats import FORMATS, Format
from ..numerics.nodes import row_of, target_of, tensors_of, viewed
from ..raised import let_through
from ..records import Batch, Capture, NonFinite
from .execute import Executor, Under, in_fp32
from .running import FULL, Running

Wrong = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Which entries are finite and yet of no use to a root, a logarithm or a division. Arguments: in FP32, in the low run."""

WRONG: Mapping[str, Wrong] = {
    "vanished": lambda expected, low: (low == 0) & (expected != 0),
    "below zero": lambda expected, low: (low < 0) & (expected >= 0),
}


@dataclass(frozen=True)
class _Beginning:
    """The operation at which entries first went wrong, and why."""

    node: str
    cause: str


def first_non_finite(capture: Capture, model: nn.Module, batch: Batch, how: Running, format: str) -> NonFinite | None:
    """The first operation that makes Inf or NaN of what is finite in FP32, in a run of the graph; None where none does.

    An operation whose Inf or NaN other operations absorb counts only where none reaches the outputs. Raises nothing of what
    an operation raises: what was seen until then counts.
    """
    turning = _Turning(capture, how, FORMATS[format])
    try:
        with torch.no_grad():
            turning.run(capture.bind(model, batch))
    except Exception as error:
        let_through(error)
    return turning.first


class _Turning:
    """A run under a policy beside the FP32 run, which follows entries that went wrong, and then those that are Inf or NaN."""

    def __init__(self, capture: Capture, how: Running, row: Format) -> None:
        self.capture, self._row = capture, row
        self._low = Executor(capture.graph_module, Under(capture, how, self._told))
        self._reference = Executor(capture.graph_module, Under(capture, FULL))
        self._turned: dict[fx.Node, NonFinite] = {}
        self._beginnings: dict[fx.Node, dict[str, _Beginning]] = {}
        self._handed: Any = None

    def run(self, inputs: Sequence[Any]) -> None:
        """Both runs, node by node."""
        both = zip(self._low.steps(*inputs), self._reference.steps(*inputs), strict=True)
        for (n, result), (_, expected) in both:
            if n.op == "call_function":
                self._compare(n, expected, result)

    @property
    def first(self) -> NonFinite | None:
        """The operation from which the outputs have their Inf or NaN, or the first one where they are finite."""
        outputs = self.capture.graph_module.graph.output_node().all_input_nodes
        reaching = (self._turned[n] for n in outputs if n in self._turned)
        return next(reaching, next(iter(self._turned.values()), None))

    def _told(self, n: fx.Node, arrived: Any, handed: Any, result: Any) -> None:
        """Keep the arguments of the current operation."""
        self._handed = handed

    def _compare(self, n: fx.Node, expected: Any, result: Any) -> None:
        """Look for entries that turned non-finite, then for those that are finite and wrong."""
        for ours, low in _pairs(expected, result):
            turned = ours.isfinite() & ~low.isfinite()
            if turned.any():
                above = (self._turned[source] for source in n.all_input_nodes if source in self._turned)
                self._turned[n] = next(above, None) or self._named(n, ours, low, turned)
                return
            for kind, wrong in WRONG.items():
                where = wrong(ours, low)
                if where.any():
                    self._beginnings.setdefault(n, {})[kind] = self._handed_down(
                        n, kind, where, n.all_input_nodes
                    ) or _Beginning(n.name, self._cause(n, kind, ours, where))

    def _handed_down(self, n: fx.Node, kind: str, where: torch.Tensor, sources: Iterable[fx.Node]) -> _Beginning | None:
        """Where entries of what the node reads went wrong that these are made from; None where they were all right."""
        for source in sources:
            found = self._beginnings.get(source, {}).get(kind)
            if found is not None and self._reaches(n, source, WRONG[kind], where):
                return found
        return None

    def _reaches(self, n: fx.Node, source: fx.Node, wrong: Wrong, where: torch.Tensor) -> bool:
        """Whether wrong entries of one value are among those that these entries of a node are made from."""
        if viewed(n) is not None or row_of(n).exact or row_of(n).reduces:
            return True
        if row_of(n).product or row_of(n).attention:
            return False
        for expected, low in _pairs(self._reference.value_of(source), self._low.value_of(source)):
            try:
                if (wrong(expected, low) & where).any():
                    return True
            except RuntimeError:  # other shapes, that do not broadcast
                return True
        return False

    def _cause(self, n: fx.Node, kind: str, expected: torch.Tensor, where: torch.Tensor) -> str:
        largest = float(expected[where].abs().max())
        if row_of(n).cancels and any(float(x.abs().max()) > 8 * largest for x in self._read(n)):
            return "cancellation"
        return "underflow" if kind == "vanished" and largest < self._row.smallest_normal else "rounding"

    def _read(self, n: fx.Node) -> list[torch.Tensor]:
        """What the node reads, in FP32."""
        found = [ours for source in n.all_input_nodes for ours in tensors_of(self._reference.value_of(source))]
        return [x for x in found if x.is_floating_point() and is_plain(x) and x.numel()]

    def _named(self, n: fx.Node, expected: torch.Tensor, low: torch.Tensor, turned: torch.Tensor) -> NonFinite:
        begins = self._upstream(n, expected, turned)
        at, above = self.capture.nodes[n.name], self.capture.nodes[begins.node]
        value = "NaN" if low[turned].isnan().any() else "Inf"
        return NonFinite(
            n.name, at.owner, at.op, at.source, value, begins.cause, above.name, above.owner, above.op, above.source
        )

    def _upstream(self, n: fx.Node, expected: torch.Tensor, turned: torch.Tensor) -> _Beginning:
        """Where the cause begins: upstream where what the node reads went wrong, else at the node itself."""
        if float(expected[turned].abs().max()) > self._row.largest:
            return _Beginning(n.name, "overflow")
        place = row_of(n).singular
        divisor = n.args[place] if place is not None and place < len(n.args) else None
        decides = [divisor] if isinstance(divisor, fx.Node) else n.all_input_nodes
        for kind in ("below zero", "vanished"):
            if (found := self._handed_down(n, kind, turned, decides)) is not None:
                return found
        return _Beginning(n.name, "rounding" if self._is_wrong_in_fp32(n) else "overflow")

    def _is_wrong_in_fp32(self, n: fx.Node) -> bool:
        """Whether the same arguments give Inf or NaN in FP32 too: then they were rounded to what has no result."""
        args, kwargs = raised(self._handed)
        try:
            results = tensors_of(in_fp32(target_of(n), args, kwargs))
        except Exception as error:
            let_through(error)
            return False
        return any(x.is_floating_point() and not entries(x).isfinite().all() for x in results)


def _pairs(expected: Any, low: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Floating tensors of two results, as float32, where their shapes are equal."""
    pairs = zip(tensors_of(raised(expected)), tensors_of(raised(low)), strict=False)
    return [(a, b) for a, b in pairs if a.is_floating_point() and is_plain(a) and is_plain(b) and a.shape == b.shape]
