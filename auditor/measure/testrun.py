"""One operation alone in a format: its low result, the exact one beside it, and what attribution needs of the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import MeasureError, first_line
from ..execution.execute import with_literals
from ..numerics.casting import like, lowered, raised
from ..numerics.entries import entries, extent, is_number
from ..numerics.formats import Format
from ..numerics.kernels import UnsupportedInFormat, is_tensor_core, product, run_op
from ..numerics.metrics import output_error, runs
from ..numerics.nodes import operation_of, row_of, settled, target_of, tensors_of, viewed
from ..raised import let_through
from ..records import Literals, NodeError

Leaves = list[torch.Tensor]
_ONE_ROUNDING = 1.1


@dataclass(frozen=True)
class Again:
    """A node's isolated errors, computed once more: its operation on reference values, rounded by `round`, which weights and inputs
    are to `row` alone. values: of every node in FP32.
    """

    node: fx.Node
    values: Mapping[str, Any]
    round: Callable[[Any], Any]
    row: Format
    literals: Literals | None

    def __call__(self) -> Leaves:
        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), self._rounded)
        low = run_op(target_of(self.node), *with_literals(args, kwargs, self.literals))
        return _gaps(self.values[self.node.name], low)

    def _rounded(self, source: fx.Node) -> Any:
        value = self.values[source.name]
        return self.round(value) if source.op == "call_function" else lowered(value, self.row)


@dataclass(frozen=True)
class Trace:
    """What attribution needs of one node in one format.

    isolated, own: low minus reference per floating leaf, as bfloat16, since they enter inner products only. isolated
    is None where rounding the result is all that happens, own is None where its error is a rounding of the result.
    by_inputs: isolated is not kept; it is own and the roundings of the inputs, which reach the result one by one.
    again: isolated is not kept; it is computed whenever it is asked for, which takes little.
    low: the node's low result where it turned non-finite. broken: it did, or flipped, or vanished where something divides by
    it. near: it is shortly before a discrete result.
    """

    isolated: Leaves | None
    own: Leaves | None
    by_inputs: bool = False
    again: Again | None = None
    low: Any = None
    broken: bool = False
    near: bool = False


@dataclass(frozen=True)
class Alone:
    """A node alone in a format: its low result, or why it cannot run.

    exact: the FP32 result on the same rounded inputs. None for views, for what moves entries only, and for products on
    a CPU, where nobody asks.
    """

    low: Any = None
    exact: Any = None
    unsupported: str | None = None


def run_alone(n: fx.Node, inputs: tuple[Any, Any], literals: Literals | None, row: Format) -> Alone:
    """The node on inputs that were rounded to the format."""
    args, kwargs = inputs
    target = target_of(n)
    exact = None
    try:
        if viewed(n) is not None:
            return Alone(run_op(target, args, kwargs))
        if is_tensor_core(target) and _on_cpu(args):
            return Alone(product(target, args, kwargs, row))  # its only error is the rounding of the result
        if not operation_of(target).exact:  # of others that only move entries, a try finds out
            exact = settled(target, target(*raised(args), **raised(kwargs)))
    except Exception as error:  # rounding the inputs can already break an operation, for instance a factorisation
        let_through(error)
        return Alone(unsupported=f"{operation_of(target).name}: {first_line(error)[:160]}")
    try:
        return Alone(run_op(target, *with_literals(args, kwargs, literals)), exact)
    except UnsupportedInFormat as error:
        return Alone(unsupported=str(error))
    except Exception as error:
        let_through(error)
        return Alone(unsupported=f"{operation_of(target).name}: {first_line(error)[:160]}")


def trace_of(n: fx.Node, reference: Any, alone: Alone, by_inputs: bool) -> Trace:
    """The errors of a node that ran."""
    local = alone.low
    if local is None:
        return Trace([], [])
    if viewed(n) is not None:
        return Trace(None, [])
    isolated: Leaves = [] if by_inputs else _gaps(reference, local)
    exact = row_of(n).exact
    if alone.exact is not None and not any(x.is_quantized for x in tensors_of(local)):  # integers, with a scale
        own, rounding = _own_errors(alone.exact, local)
        if own > _ONE_ROUNDING * rounding:
            return Trace(isolated, _gaps(alone.exact, local), by_inputs)
        exact = own == 0
    if exact:
        return Trace(None if _is_rounded(reference, local) else isolated, [], by_inputs)
    return Trace(isolated, None, by_inputs)


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


def turned(error: NodeError) -> bool:
    """Whether finite entries became Inf or NaN."""
    return bool(error.overflow or error.nan)


def _gaps(reference: Any, candidate: Any) -> Leaves:
    """candidate - reference per leaf; zero where either is not finite, and for leaves that are not numbers."""
    result = []
    for r, c in zip(tensors_of(reference), tensors_of(candidate), strict=False):
        if not is_number(r) or extent(r) != extent(c):
            result.append(torch.zeros((), dtype=torch.bfloat16))
            continue
        result.append(_gap(entries(r), entries(c)))
    return result


def _gap(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """candidate - reference in bfloat16, zero where it is not finite there."""
    found = torch.empty_like(reference, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    for r, c, kept in runs(reference, candidate, found):
        kept.copy_(c.float() - r.float())
        kept.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return found


def _on_cpu(tree: Any) -> bool:
    return all(leaf.device.type == "cpu" for leaf in tensors_of(tree))
