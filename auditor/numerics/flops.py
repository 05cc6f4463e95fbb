"""FLOPs of one operation from its shapes, a multiply-add counted as two: one formula per kind of matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .nodes import row_of, tensors_in

FORMULAS: dict[str, Callable[..., int]] = {}
"""{name: formula(first result, *positional arguments of the call) -> FLOPs}; the tensors are meta tensors."""


def flops_of(node: fx.Node) -> int:
    """FLOPs of a node; 0 if it is not a matrix product, or its shape was not recorded."""
    name = row_of(node).flops
    function = FORMULAS.get(name)
    # Rows of a jagged tensor are rows of a matrix, whatever the sequence lengths; its attention isn't counted.
    shape = "rows" if name in ("product", "added_product") else "val"
    out = tensors_in(_outline(node, shape))
    if function is None or not out:
        return 0
    args = fx.node.map_arg(node.args, lambda source: _outline(source, shape))
    return int(function(out[0], *args))


def _outline(node: fx.Node, shape: str) -> Any:
    return node.meta.get(shape, node.meta.get("val"))


def _formula(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def register(function: Callable[..., int]) -> Callable[..., int]:
        if name in FORMULAS:
            raise ValueError(f"there are two FLOP formulas {name!r}")
        FORMULAS[name] = function
        return function

    return register


@_formula("product")
def _product(out: torch.Tensor, a: torch.Tensor, *_: Any) -> int:
    return int(2 * out.numel() * a.shape[-1])  # [.., m, k] @ [k, n]


@_formula("added_product")
def _added_product(out: torch.Tensor, _bias: torch.Tensor, a: torch.Tensor, *_: Any) -> int:
    return int(2 * out.numel() * a.shape[-1])


@_formula("summed_product")
def _summed_product(out: torch.Tensor, _bias: torch.Tensor, a: torch.Tensor, *_: Any) -> int:
    return int(2 * out.numel() * a.shape[0] * a.shape[-1])  # the sum over b of [b, m, k] @ [b, k, n]


@_formula("grouped_product")
def _grouped_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    # Groups split the rows or the columns; if two matrices give [g, m, n], they split the summed dimension.
    groups = out.shape[0] if a.dim() == b.dim() == 2 else 1
    return int(2 * out.numel() * a.shape[-1] // groups)


@_formula("convolution")
def _convolution(out: torch.Tensor, _x: torch.Tensor, weight: torch.Tensor, *_: Any) -> int:
    return int(2 * out.numel() * math.prod(weight.shape[1:]))  # weight: [c_out, c_in / groups, *kernel]


@_formula("transposed_convolution")
def _transposed_convolution(_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any) -> int:
    return int(2 * x.numel() * math.prod(weight.shape[1:]))  # weight: [c_in, c_out / groups, *kernel]


@_formula("attention")
def _attention(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *_: Any) -> int:
    return (
        2 * q.numel() * k.shape[-2] + 2 * out.numel() * k.shape[-2]
    )  # [.., s, d] @ [.., d, t], [.., s, t] @ [.., t, e]


@_formula("einsum")
def _einsum(out: torch.Tensor, equation: str, operands: Any, *_: Any) -> int:
    subscripts = equation.replace(" ", "").split("->")[0].split(",")
    sizes = {s: n for names, x in zip(subscripts, operands, strict=True) for s, n in zip(names, x.shape, strict=False)}
    return int(2 * math.prod(sizes.values()))


@_formula("recurrent")
def _recurrent(_out: torch.Tensor, x: torch.Tensor, _state: Any, weights: Any, *_: Any) -> int:
    steps = x.numel() // x.shape[-1]  # sequence length times batch
    return int(2 * steps * sum(w.numel() for w in weights if w.dim() == 2))


@_formula("cell")
def _cell(
    _out: torch.Tensor, x: torch.Tensor, _state: Any, of_input: torch.Tensor, of_state: torch.Tensor, *_: Any
) -> int:
    return int(2 * (x.numel() // x.shape[-1]) * (of_input.numel() + of_state.numel()))
