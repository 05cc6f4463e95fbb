"""FLOPs of one operation from its shapes, a multiply-add counted as two: one formula per kind of matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from .nodes import row_of, tensors_in


def flops_of(node: fx.Node) -> int:
    """FLOPs of a node; 0 if it is not a matrix product, or its shape was not recorded."""
    name = row_of(node).flops
    function = FORMULAS.get(name)
    # Rows of a jagged tensor count as rows of a matrix, whatever the sequence lengths; its attention isn't counted.
    shape = "rows" if name in ("product", "added_product") else "val"
    out = tensors_in(_outline(node, shape))
    if function is None or not out:
        return 0
    args = fx.node.map_arg(node.args, lambda source: _outline(source, shape))
    return int(function(out[0], *args))


def _outline(node: fx.Node, shape: str) -> Any:
    return node.meta.get(shape, node.meta.get("val"))


def _grouped_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    # Groups split the rows or the columns of the result, whose product is then a block per group. If two matrices
    # [m, k] and [k, n] give [g, m, n], the groups split the summed dimension k instead.
    groups = out.shape[0] if a.dim() == b.dim() == 2 else 1
    return 2 * out.numel() * a.shape[-1] // groups


def _einsum(out: torch.Tensor, equation: str, operands: Any, *_: Any) -> int:
    inputs = equation.replace(" ", "").split("->")[0].split(",")
    size_of = dict[str, int]()
    for letters, x in zip(inputs, operands, strict=True):
        size_of |= dict(zip(letters, x.shape, strict=False))
    return 2 * math.prod(size_of.values())


def _recurrent(out: torch.Tensor, x: torch.Tensor, state: Any, weights: Any, *_: Any) -> int:
    steps = x.numel() // x.shape[-1]  # sequence length times batch
    return 2 * steps * sum(w.numel() for w in weights if w.dim() == 2)


FORMULAS: Mapping[str, Callable[..., int]] = {
    "product": lambda out, a, *_: 2 * out.numel() * a.shape[-1],  # [.., m, k] @ [k, n]
    "added_product": lambda out, bias, a, *_: 2 * out.numel() * a.shape[-1],
    # the sum over b of [b, m, k] @ [b, k, n]
    "summed_product": lambda out, bias, a, *_: 2 * out.numel() * a.shape[0] * a.shape[-1],
    "grouped_product": _grouped_product,
    # weight: [c_out, c_in / groups, *kernel], if transposed [c_in, c_out / groups, *kernel]
    "convolution": lambda out, x, weight, *_: 2 * out.numel() * math.prod(weight.shape[1:]),
    "transposed_convolution": lambda out, x, weight, *_: 2 * x.numel() * math.prod(weight.shape[1:]),
    # [.., s, d] @ [.., d, t], [.., s, t] @ [.., t, e]
    "attention": lambda out, q, k, *_: 2 * (q.numel() + out.numel()) * k.shape[-2],
    "einsum": _einsum,
    "recurrent": _recurrent,
    "cell": lambda out, x, state, by_input, by_state, *_: (
        2 * (x.numel() // x.shape[-1]) * (by_input.numel() + by_state.numel())
    ),
}
"""{name: formula(first result, *positional arguments of the call) -> FLOPs}; the tensors are meta tensors."""
