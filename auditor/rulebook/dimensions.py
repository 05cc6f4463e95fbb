"""Computes from shapes how many elements each operation reduces, and the sizes of matrix products."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from typing import Any

from torch import fx

from ..numerics.nodes import arguments_with_defaults, row_of, shape, source

Arguments = dict[str, Any]
Gemm = tuple[int, int, int]

LARGEST_TILE = 64
"""Largest alignment of a matrix dimension that the facts distinguish."""

_NOT_APPLICABLE = (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError)
"""Exceptions that a formula raises for an unsupported overload, rank or size, which make a fact unknown."""


def reduction_length(node: fx.Node) -> int | None:
    """Input elements per output element, or per statistic of a norm; None if the operation reduces nothing."""
    result: int | None = _apply(_REDUCTIONS, row_of(node).reduces, node)
    return result


def gemm(node: fx.Node) -> dict[str, Any]:
    """Facts about one matrix product, [m, k] @ [k, n]: m, n, k and their alignment for tensor cores; {} for other
    nodes.

    The input's leading dimensions count into m. A convolution counts as the implicit product of one group; its channels
    decide the alignment.
    """
    size: Gemm | None = _apply(_GEMMS, row_of(node).gemm, node)
    if size is None:
        return {}
    m, n, k = size
    weight = arguments_with_defaults(node).get("weight") if row_of(node).gemm.endswith("convolution") else None
    tiled = shape(weight)[:2] if weight is not None else (n, k)
    odd = dict.fromkeys(str(width) for width in tiled if width % 8)
    padded = prod(math.ceil(width / 8) * 8 for width in tiled)
    return {
        "gemm_m": m,
        "gemm_n": n,
        "gemm_k": k,
        "gemm_alignment": gcd(*tiled, LARGEST_TILE),
        "gemm_m_alignment": gcd(m, LARGEST_TILE),
        "gemm_padding": padded / prod(tiled) - 1 if prod(tiled) else None,
        "misaligned": " and ".join(odd) or None,
    }


def sequence_length(node: fx.Node) -> int | None:
    """Steps of a recurrent operation; for a cell, the number of calls with the same weights."""
    row, args = row_of(node), arguments_with_defaults(node)
    try:
        if row.recurrent and "input" in args:
            sizes = shape(args["input"])
            return sizes[1] if args["batch_first"] and len(sizes) == 3 else sizes[0]
        if row.cell:
            return sum(user.target is node.target for user in source(args["w_ih"]).users)
    except _NOT_APPLICABLE:
        return None
    return None


def _apply(table: Mapping[str, Callable[[Arguments, fx.Node], Any]], name: str, node: fx.Node) -> Any:
    formula = table.get(name)
    try:
        return formula(arguments_with_defaults(node), node) if formula else None
    except _NOT_APPLICABLE:
        return None


def _extent(sizes: Sequence[int], dims: Any) -> int:
    dims = [dims] if isinstance(dims, int) else dims
    return prod(sizes[d] for d in dims) if dims and sizes else prod(sizes)


def _attention(args: Arguments, node: fx.Node) -> Gemm:
    *_, t, e = shape(args["query"])
    return t, shape(args["key"])[-2], e


def _linear(args: Arguments, node: fx.Node) -> Gemm:
    *lead, k = shape(args["input"])
    return prod(lead), shape(args["weight"])[0], k


def _product(args: Arguments, node: fx.Node) -> Gemm:
    """Sizes of [*, m, k] @ [*, k, n]; vectors lack m or n."""
    left, right = _operands(args)
    left_shape = shape(left)
    right_shape = shape(right)
    m = left_shape[-2] if len(left_shape) > 1 else 1
    n = right_shape[-1] if len(right_shape) > 1 else 1
    if len(right_shape) <= 2 and len(left_shape) > 1:  # one product over all leading dimensions
        m = prod(left_shape[:-1])
    return m, n, left_shape[-1]


def _operands(args: Arguments) -> tuple[Any, Any]:
    for left, right in (("mat1", "mat2"), ("batch1", "batch2"), ("mat", "vec"), ("self", "mat2"), ("self", "vec")):
        if left in args and right in args:
            return args[left], args[right]
    return args["self"], args["other"] if "other" in args else args["tensor"]


def _convolution(args: Arguments, node: fx.Node) -> Gemm:
    c_out, c_in, *kernel = shape(args["weight"])
    return _positions(shape(node), kernel), c_out // int(args["groups"]), c_in * prod(kernel)  # c_in: of one group


def _transposed_convolution(args: Arguments, node: fx.Node) -> Gemm:
    c_in, c_out, *kernel = shape(args["weight"])
    return _positions(shape(args["input"]), kernel), c_out * prod(kernel), c_in // int(args["groups"])


def _positions(sizes: Sequence[int], kernel: Sequence[int]) -> int:
    """Samples times spatial positions of a feature map [n, c, ...]; the batch dimension may be missing."""
    return prod(sizes[-len(kernel) :]) * prod(sizes[: -len(kernel) - 1])


def _einsum(args: Arguments, node: fx.Node) -> Gemm:
    """Sizes of an einsum such as `bik,bkj->bij`: n is of the letters of the right operand alone, k of those summed."""
    equation = args["equation"].replace(" ", "")
    operands = args["tensors"]
    if len(operands) != 2 or "." in equation:
        raise ValueError("only an einsum of two operands, without an ellipsis, has sizes m, n and k")
    inputs, arrow, output = equation.partition("->")
    left, right = inputs.split(",")
    if not arrow:  # then the letters that occur once are kept
        output = "".join(letter for letter, times in Counter(left + right).items() if times == 1)
    sizes = shape(operands[0]) + shape(operands[1])
    size_of = dict(zip(left + right, sizes, strict=True))

    def size(letters: set[str]) -> int:
        return prod(size_of[letter] for letter in letters)

    m = size((set(left) - set(right)) & set(output))
    n = size((set(right) - set(left)) & set(output))
    k = size(set(left + right) - set(output))
    return m, n, k


_REDUCTIONS: Mapping[str, Callable[[Arguments, fx.Node], int]] = {
    "dims": lambda args, node: _extent(shape(args.get("self", args.get("x"))), args.get("dim")),
    "normalized_shape": lambda args, node: prod(args["normalized_shape"]),
    "group": lambda args, node: prod(shape(args["input"])[1:]) // int(args["num_groups"]),
    "native_group": lambda args, node: int(args["C"]) // int(args["group"]) * int(args["HxW"]),
    "instance": lambda args, node: prod(shape(args["input"])[2:]),
    "batch": lambda args, node: prod(shape(args["input"])) // shape(args["input"])[1],
    "window": lambda args, node: max(1, prod(shape(args["self"])) // max(1, prod(shape(node)))),
    "targets": lambda args, node: max(1, prod(shape(args["target"]))) if args["reduction"] else 1,
    "loss": lambda args, node: prod(shape(node.all_input_nodes[0])) if args["reduction"] else 1,
    "keys": lambda args, node: shape(args["key"])[-2],
}
_GEMMS: Mapping[str, Callable[[Arguments, fx.Node], Gemm]] = {
    "attention": _attention,
    "linear": _linear,
    "product": _product,
    "convolution": _convolution,
    "transposed_convolution": _transposed_convolution,
    "einsum": _einsum,
}
"""{name in operations.toml: formula}."""
