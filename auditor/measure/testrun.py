"""One operation alone in a format: its low result, the exact one beside it, and what attribution needs of the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import first_line
from ..formats.carried import like
from ..formats.entries import entries, extent, is_number
from ..formats.table import Format
from ..ops.casting import lowered
from ..ops.kernels import UnsupportedInFormat, run_op
from ..ops.nodes import operation_of, row_of, target_of, tensors_of, viewed
from ..ops.products import is_tensor_core, product
from ..raised import let_through
from ..records import Literals, NodeError
from ..replay.execute import with_literals
from .exact import Exact, sampled

Leaves = list[torch.Tensor]
_ONE_ROUNDING = 1.1
_CHUNK = 1 << 17


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
    low: the node's low result, where the rest of the model must be run on it. certain: it turned non-finite, flipped,
    or vanished where something divides by it. vanished: that last alone is why it must be run.
    """

    isolated: Leaves | None
    own: Leaves | None
    by_inputs: bool = False
    again: Again | None = None
    low: Any = None
    certain: bool = False
    vanished: bool = False


@dataclass(frozen=True)
class Alone:
    """A node alone in a format: its low result, or why it cannot run.

    exact: the FP32 result on the same rounded inputs. None for views, for what moves entries only, and for products on
    a CPU, where nobody asks.
    """

    low: Any = None
    exact: Exact | None = None
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
            exact = Exact(target, args, kwargs)
            exact.prepare()
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


def trace_of(n: fx.Node, reference: Any, alone: Alone, gap: torch.Tensor | None, by_inputs: bool) -> Trace:
    """The errors of a node that ran; gap: low - reference of its first leaf, where that is known already."""
    local = alone.low
    if local is None:
        return Trace([], [])
    if viewed(n) is not None:
        return Trace(None, [])
    if by_inputs:
        isolated: Leaves = []
    elif gap is None:
        isolated = _gaps(reference, local)
    else:
        isolated = [gap, *_gaps(*(tensors_of(x)[1:] for x in (reference, local)))]
    if alone.exact is not None and not any(x.is_quantized for x in tensors_of(local)):  # integers, with a scale
        own, rounding = _sampled_errors(alone.exact.sample(local), tensors_of(local))
        if own > _ONE_ROUNDING * rounding:
            return Trace(isolated, _gaps(alone.exact.whole, local), by_inputs)
        exact = own == 0
    else:
        exact = row_of(n).exact
    if exact:
        return Trace(None if _is_rounded(reference, local) else isolated, [], by_inputs)
    return Trace(isolated, None, by_inputs)


def _is_rounded(reference: Any, local: Any) -> bool:
    pairs = zip(tensors_of(reference), tensors_of(local), strict=True)
    return all(torch.equal(entries(_like(sampled(r), low)), sampled(low)) for r, low in pairs)


def _like(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Real numbers, rounded as the result is that they are among."""
    return x.to(result.dtype.to_real()) if result.is_complex() and not x.is_complex() else like(x, result)


def _sampled_errors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], results: Leaves) -> tuple[float, float]:
    """L2 over all (exact, low): of low - exact, and of what rounding the exact result once would do."""
    own, rounding = [0.0], [0.0]
    for (exact, low), result in zip(pairs, results, strict=True):
        if exact.shape != low.shape:  # a sparse result that lost entries
            own.append(math.inf)
            continue
        wide = torch.complex128 if exact.is_complex() else torch.float64
        own.append(float(torch.linalg.vector_norm(low.to(wide) - exact.to(wide))))
        rounding.append(float(torch.linalg.vector_norm(_like(exact, result).to(wide) - exact.to(wide))))
    return math.hypot(*own), math.hypot(*rounding)


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
    """candidate - reference in bfloat16; without copies larger than a processor's cache where their entries lie in order."""
    if not (reference.is_contiguous() and candidate.is_contiguous() and reference.device.type == "cpu"):
        return _gap_of(reference, candidate)
    found = torch.empty_like(reference, dtype=torch.bfloat16)
    runs = (torch.split(x.reshape(-1), _CHUNK) for x in (reference, candidate, found))
    for r, c, kept in zip(*runs, strict=True):
        kept.copy_(_gap_of(r, c))
    return found


def _gap_of(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    gap = candidate.float() - reference.float()
    return gap.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).bfloat16()


def _on_cpu(tree: Any) -> bool:
    return all(leaf.device.type == "cpu" for leaf in tensors_of(tree))
