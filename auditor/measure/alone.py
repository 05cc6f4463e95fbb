"""One operation alone in a format, on FP32 values rounded to it: its low result, and how far that is from the right one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..errors import MeasureError, first_line, let_through
from ..execution.execute import low_literals, with_literals
from ..numerics.casting import in_format, like, lowered, raised
from ..numerics.entries import entries, extent
from ..numerics.formats import FORMATS, Format
from ..numerics.kernels import UnsupportedInFormat, is_tensor_core, run_op
from ..numerics.metrics import output_error
from ..numerics.nodes import operation_of, row_of, settled, target_of, tensors_of, viewed
from ..records import Capture, Literals

Leaves = list[torch.Tensor]
Error = Literal["none", "rounding", "inputs", "run"]
"""Where an error comes from: there is none; it is the rounding of the FP32 result; it is the node's own error beside the
roundings of its inputs, which reach the result one by one; only a run of the operation tells."""

_ONE_ROUNDING = 1.1


@dataclass(frozen=True)
class Rounder:
    """Rounds the tensors of a tree to a format; masked entries become what the model itself would write there.

    sentinels: {float32 value: value in the format} of the literals with which Python marks what to mask.
    """

    row: Format
    sentinels: Mapping[float, float]

    def __call__(self, tree: Any) -> Any:
        """Tensors in the format, the rest as it is."""

        def convert(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = lowered(x, self.row)
            for ours, theirs in self.sentinels.items() if x.dtype is torch.float32 else ():
                result = in_format(torch.where(x == ours, torch.full_like(result, theirs), result), self.row)
            return result

        return pytree.tree_map_only(torch.Tensor, convert, tree)


def rounder(capture: Capture, fmt: str) -> Rounder:
    """The rounding of a capture's values to one format."""
    nodes = {node.name: node for node in capture.graph_module.graph.nodes}
    found = {}
    for name, node in capture.nodes.items():
        literals = low_literals(node, fmt)
        for key, value in literals.arguments.items() if literals else ():
            ours = nodes[name].args[key] if isinstance(key, int) else nodes[name].kwargs.get(key)
            if isinstance(value, (int, float)) and isinstance(ours, (int, float)):
                found[float(ours)] = float(value)
    return Rounder(FORMATS[fmt], found)


@dataclass(frozen=True)
class Trace:
    """How a node errs in one format: isolated, on rounded inputs, and of its own, beside the exact result on these.

    broken: it turned non-finite, or flipped, or vanished where something divides by it. near: it is shortly before a
    discrete result.
    """

    isolated: Error = "none"
    own: Error = "none"
    broken: bool = False
    near: bool = False


@dataclass(frozen=True)
class Ran:
    """A node alone in a format: its low result, or why it cannot run.

    exact: the FP32 result on the same rounded inputs. None for what moves entries only, and for products on a CPU, whose only
    error is the rounding of the result.
    """

    low: Any = None
    exact: Any = None
    unsupported: str | None = None


class Alone:
    """Runs nodes alone in a format. values: of the nodes in FP32, by name. kept: runs of nodes that are not run again."""

    def __init__(self, capture: Capture, format: str, values: Mapping[str, Any]) -> None:
        self.name, self.row, self.round = format, FORMATS[format], rounder(capture, format)
        self._nodes, self._values = capture.nodes, values
        self.kept: dict[str, Ran] = {}

    def literals(self, n: fx.Node) -> Literals | None:
        """What Python writes at the node in this format."""
        return low_literals(self._nodes[n.name], self.name)

    def rounded(self, source: fx.Node) -> Any:
        """A value as an operation reads it: weights and inputs are the model's own, and have no sentinels."""
        value = self._values[source.name]
        return self.round(value) if source.op == "call_function" else lowered(value, self.row)

    def run(self, n: fx.Node, inputs: tuple[Any, Any], beside: bool = True) -> Ran:
        """The node on inputs that were rounded to the format. beside: the exact result on these as well."""
        args, kwargs = inputs
        target = target_of(n)
        try:
            exact = (
                None
                if not beside or _is_rounded_once(n, args)
                else settled(target, target(*raised(args), **raised(kwargs)))
            )
            return Ran(run_op(target, *with_literals(args, kwargs, self.literals(n))), exact)
        except UnsupportedInFormat as error:
            return Ran(unsupported=str(error))
        except Exception as error:  # rounding the inputs can already break an operation, for instance a factorisation
            let_through(error)
            return Ran(unsupported=f"{operation_of(target).name}: {first_line(error)[:160]}")

    def errors(self, n: fx.Node, trace: Trace, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of its errors in one of its tensors that only a run tells, "isolated" and "own"."""
        if "run" not in (trace.own, trace.isolated):
            return
        ran = self.kept.get(n.name)
        ran = ran or self.run(n, fx.node.map_arg((n.args, n.kwargs), self.rounded), beside=trace.own == "run")
        low = tensors_of(ran.low)[index].float()
        if trace.own == "run":
            yield "own", low - tensors_of(ran.exact)[index]
        if trace.isolated == "run":
            yield "isolated", low - tensors_of(self._values[n.name])[index]


def trace_of(n: fx.Node, reference: Any, ran: Ran, by_inputs: bool) -> Trace:
    """Where the errors of a node come from. by_inputs: whether those of its inputs can be told apart."""
    if ran.low is None:
        return Trace()
    if viewed(n) is not None:
        return Trace("rounding", "none")
    isolated: Error = "inputs" if by_inputs else "run"
    exact = row_of(n).exact
    if ran.exact is not None and not any(x.is_quantized for x in tensors_of(ran.low)):  # integers, with a scale
        own, rounding = _own_errors(ran.exact, ran.low)
        if own > _ONE_ROUNDING * rounding:
            return Trace(isolated, "run")
        exact = own == 0
    if exact:
        return Trace("rounding" if _is_rounded(reference, ran.low) else isolated, "none")
    return Trace(isolated, "rounding")


def _is_rounded_once(n: fx.Node, args: Any) -> bool:
    target = target_of(n)
    on_cpu = all(leaf.device.type == "cpu" for leaf in tensors_of(args))
    return viewed(n) is not None or operation_of(target).exact or (is_tensor_core(target) and on_cpu)


def _is_rounded(reference: Any, local: Any) -> bool:
    pairs = zip(tensors_of(reference), tensors_of(local), strict=True)
    return all(torch.equal(entries(_like(r, low)), entries(low)) for r, low in pairs)


def _like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Real numbers, rounded as the result is that they are among."""
    return x.to(result.dtype.to_real()) if result.is_complex() and not x.is_complex() else like(x, result)


def _own_errors(exact: Any, low: Any) -> tuple[float, float]:
    """Relative L2 of a low result against the exact one, and of what rounding that once would do."""
    wide, local = tensors_of(exact), tensors_of(low)
    try:
        return output_error(wide, local), output_error(wide, [_like(e, x) for e, x in zip(wide, local, strict=True)])
    except MeasureError:  # a sparse result that lost entries
        return math.inf, 0.0


def same_shapes(a: Any, b: Any) -> bool:
    """Whether the tensors of two results have the same shapes, and sparse ones as many entries."""
    ours, theirs = ([extent(x) for x in tensors_of(tree)] for tree in (a, b))
    return ours == theirs
