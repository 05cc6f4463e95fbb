"""One operation alone in a format: its low result, the exact one beside it, and what attribution needs of the two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..fxnodes import mutates, packet_name, settled, target_of, tensors_of, viewed
from ..numerics.kernels import UnsupportedInFormat, is_tensor_core, product, raised, run_op
from ..records import NodeError
from ..simulation.execute import with_literals

Leaves = list[torch.Tensor]
_SAMPLE = 1 << 14
_ONE_ROUNDING = 1.1


@dataclass
class Trace:
    """What attribution needs of one node in one format.

    isolated, own: low minus reference per floating leaf, as bfloat16, since they enter inner products only. isolated
    is None where rounding the result is all that happens, own is None where its error is a rounding of the result.
    low: the node's low result, where the rest of the model must be run on it. certain: it turned non-finite, flipped,
    or vanished where something divides by it.
    """

    isolated: Leaves | None
    own: Leaves | None
    low: Any = None
    certain: bool = False


def run_alone(
    n: fx.Node, inputs: tuple[Any, Any], literals: Mapping[int | str, Any] | None, dtype: torch.dtype
) -> tuple[Any, Any, str | None]:
    """The node alone in the format: its low result, the exact one on the same rounded inputs, or why it cannot run.

    For views and for products on a CPU the low result stands for the exact one, which nobody asks for.
    """
    args, kwargs = inputs
    target = target_of(n)
    if viewed(n) is not None:
        low = target(*args, **kwargs)
        return low, low, None
    if mutates(n.target):
        args, kwargs = _fresh(args), _fresh(kwargs)
    try:
        if is_tensor_core(target) and _on_cpu(args):
            low = product(target, args, kwargs, dtype)
            return low, low, None  # its only error is the rounding of the result
        exact = settled(n.target, target(*raised(args), **raised(kwargs)))
    except Exception as error:  # rounding the inputs can already break an operation, for instance a factorisation
        return None, None, f"{packet_name(target)}: {str(error).splitlines()[0][:160]}"
    try:
        return run_op(target, *with_literals(args, kwargs, literals)), exact, None
    except UnsupportedInFormat as error:
        return None, None, str(error)
    except RuntimeError as error:
        return None, None, str(error).splitlines()[0][:160]


def trace_of(n: fx.Node, reference: Any, local: Any, exact: Any, gap: torch.Tensor | None) -> Trace:
    """The errors of a node that ran; gap: low - reference of its first leaf, where that is known already."""
    if local is None:
        return Trace([], [])
    if viewed(n) is not None:
        return Trace(None, [])
    isolated = (
        _gaps(reference, local) if gap is None else [gap, *_gaps(*(tensors_of(x)[1:] for x in (reference, local)))]
    )
    if is_tensor_core(target_of(n)):
        return Trace(isolated, None)
    own, rounding = _sampled_errors(exact, local)
    if own == 0:  # entries were moved, chosen or repeated
        return Trace(None if _is_rounded(reference, local) else isolated, [])
    return Trace(isolated, None if own <= _ONE_ROUNDING * rounding else _gaps(exact, local))


def _is_rounded(reference: Any, local: Any) -> bool:
    pairs = zip(tensors_of(reference), tensors_of(local), strict=True)
    return all(torch.equal(_sample(r).to(low.dtype), _sample(low)) for r, low in pairs)


def _sampled_errors(exact: Any, local: Any) -> tuple[float, float]:
    """L2 over a sample of all leaves: of local - exact, and of what rounding the exact result once would do."""
    own, rounding = [0.0], [0.0]
    for e, low in zip(tensors_of(exact), tensors_of(local), strict=True):
        e, low = _sample(e), _sample(low)
        wide = torch.promote_types(e.dtype, torch.float64)
        own.append(float(torch.linalg.vector_norm(low.to(wide) - e.to(wide))))
        rounding.append(float(torch.linalg.vector_norm(e.to(low.dtype).to(wide) - e.to(wide))))
    return math.hypot(*own), math.hypot(*rounding)


def _sample(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


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
        result.append(gap.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).bfloat16())
    return result


def _fresh(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, tree)


def _on_cpu(tree: Any) -> bool:
    return all(leaf.device.type == "cpu" for leaf in tensors_of(tree))
