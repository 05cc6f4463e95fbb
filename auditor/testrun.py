"""One operation alone in a format: its low result, the exact one beside it, and what attribution needs of the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .execute import with_literals
from .fxnodes import mutates, packet_name, settled, target_of, tensors_of, viewed
from .numerics.kernels import UnsupportedInFormat, is_tensor_core, lowered, raised, run_op
from .records import NodeError

Leaves = list[torch.Tensor]


@dataclass
class Trace:
    """What attribution needs of one node in one format.

    isolated, own: low minus reference per floating leaf, as bfloat16, since they enter inner products only. isolated
    is None where rounding the result is all that happens, own is None where its error is a rounding of the result.
    low: the node's low result where it must be re-run. broken: it turned non-finite.
    """

    isolated: Leaves | None
    own: Leaves | None
    low: Any
    broken: bool


def run_alone(
    n: fx.Node, inputs: tuple[Any, Any], literals: Mapping[int | str, Any] | None, dtype: torch.dtype
) -> tuple[Any, Any, str | None]:
    """The node alone in the format: its low result, the exact one on the same rounded inputs, or why it cannot run."""
    args, kwargs = inputs
    if mutates(n.target):
        args, kwargs = _fresh(args), _fresh(kwargs)
    try:
        exact = settled(n.target, target_of(n)(*raised(args), **raised(kwargs)))
    except Exception as error:  # rounding the inputs can already break an operation, for instance a factorisation
        return None, None, f"{packet_name(target_of(n))}: {str(error).splitlines()[0][:160]}"
    try:
        if is_tensor_core(target_of(n)) and _on_cpu(args):
            return lowered(exact, dtype), exact, None  # what run_op would compute a second time
        return run_op(target_of(n), *with_literals(args, kwargs, literals)), exact, None
    except UnsupportedInFormat as error:
        return None, None, str(error)
    except RuntimeError as error:
        return None, None, str(error).splitlines()[0][:160]


def trace_of(n: fx.Node, reference: Any, local: Any, exact: Any, gap: torch.Tensor | None, error: NodeError) -> Trace:
    if local is None:
        return Trace([], [], None, broken=False)
    broken = turned(error)
    if viewed(n) is not None:
        return Trace(None, [], local if broken else None, broken)
    isolated = _gaps(reference, local) if gap is None or len(tensors_of(local)) > 1 else [gap.bfloat16()]
    own: Leaves | None
    if is_tensor_core(target_of(n)) or _is_rounding(exact, local):
        own = None
    elif _is_exact(exact, local):
        own = []
    else:
        own = _gaps(exact, local)
    return Trace(isolated, own, local, broken)


def _is_rounding(exact: Any, local: Any) -> bool:
    """Whether the low result is the exact one, rounded once: no half-precision intermediate showed."""
    pairs = list(zip(tensors_of(exact), tensors_of(local), strict=True))
    return all(torch.equal(a.to(b.dtype), b) for a, b in pairs) and not _is_exact(exact, local)


def _is_exact(exact: Any, local: Any) -> bool:
    """Whether the low result is the exact one as it is: entries were moved, chosen or repeated, not computed."""
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(tensors_of(exact), tensors_of(local), strict=True))


def turned(error: NodeError) -> bool:
    """Whether finite entries became Inf or NaN."""
    return bool(error.overflow or error.nan)


def _gaps(reference: Any, candidate: Any) -> Leaves:
    """candidate - reference per leaf; zero where either is not finite, and for leaves that are not real numbers."""
    result = []
    for r, c in zip(tensors_of(reference), tensors_of(candidate), strict=False):
        if not r.is_floating_point() or r.shape != c.shape:
            result.append(torch.zeros((), dtype=torch.bfloat16))
            continue
        gap = c.float() - r.float()
        result.append(torch.where(torch.isfinite(gap), gap, torch.zeros_like(gap)).bfloat16())
    return result


def _fresh(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, tree)


def _on_cpu(tree: Any) -> bool:
    return all(leaf.device.type == "cpu" for leaf in tensors_of(tree))
