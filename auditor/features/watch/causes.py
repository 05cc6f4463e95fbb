"""Why an operation, or its derivative, gives Inf or NaN, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...numerics.entries import all_finite, entries
from ...numerics.formats import is_low

BY_SECOND = ("div", "true_divide", "remainder", "fmod")
"""Operations that divide by their second argument."""
BY_FIRST = ("reciprocal", "rsqrt")
LOGARITHMS = ("log", "log2", "log10", "log1p", "logit", "xlogy", "digamma", "lgamma")
ROOTS = ("sqrt", "rsqrt")
DOMAINS = ("asin", "acos", "acosh", "atanh", "erfinv")
EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh", "pow", "logcumsumexp")
INFINITE_SLOPE = ("sqrt", "norm", "linalg_vector_norm", "cdist", "pow", "std", "var", "acos", "asin", "frobenius_norm")
"""Operations whose derivative is infinite, or not a number, at 0 or at the border of their domain."""
NAMES = {torch.float16: "FP16", torch.bfloat16: "BF16", torch.float32: "FP32"}


def cause_of(op: Any, args: Any, inputs: list[torch.Tensor], broken: list[torch.Tensor]) -> str:
    """Why a result is not finite. inputs: the tensors among the arguments. broken: the results that are not finite."""
    name = _plain(str(getattr(op, "_opname", op)))
    bad = [x for x in inputs if not all_finite(x)]
    if bad:
        return _cause_in_arguments(name, bad, broken)
    outside = _cause_in_domain(name, args)
    if outside:
        return outside
    dtype = broken[0].dtype
    if is_low(dtype) or name in EXPONENTIALS or _any_infinite(broken):
        return f"overflow: a value exceeds {_largest_of(dtype)}"
    return "the result is not a number"


def _cause_in_arguments(name: str, bad: list[torch.Tensor], broken: list[torch.Tensor]) -> str:
    if _any_nan(bad):
        return "an argument is NaN already"
    if not _any_nan(broken):
        return "an argument is Inf already"
    if "softmax" in name:
        return "all entries of a row are -Inf"
    return "Inf minus Inf, Inf / Inf or 0 times Inf"


def _cause_in_domain(name: str, args: Any) -> str:
    """Which argument is outside the operation's domain; "" for none."""
    first = args[0] if args else None
    second = args[1] if len(args) > 1 else None
    zero = -1.0 if name == "log1p" else 0.0
    if name in BY_SECOND and _has(second, lambda x: x == 0):
        return "division by zero"
    if name in BY_FIRST and _has(first, lambda x: x == 0):
        return "division by zero"
    if name in ROOTS and _has(first, lambda x: x < 0):
        return "square root of a negative number"
    if name in LOGARITHMS and _has(first, lambda x: x < zero):
        return "logarithm of a negative number"
    if name in LOGARITHMS and _has(first, lambda x: x == zero):
        return "logarithm of zero"
    if name == "pow" and _has(first, lambda x: x == 0):
        return "zero to a negative power"
    if name == "pow" and _has(first, lambda x: x < 0):
        return "power of a negative number"
    if name in DOMAINS:
        return "argument at or beyond the border of the domain"
    return ""


def backward_cause(name: str, broken: torch.Tensor) -> str:
    """Why the gradient `broken` is not finite, though the gradients of the operation's results are."""
    name = _plain(name)
    has_nan = _any_nan([broken])
    if not has_nan and is_low(broken.dtype):
        return f"overflow: a gradient exceeds {_largest_of(broken.dtype)}"
    if name in INFINITE_SLOPE:
        return "the derivative is infinite there, usually at 0"
    if name in (*BY_SECOND, *BY_FIRST, *LOGARITHMS):
        return "division by zero in the derivative"
    return "0 times Inf, or Inf minus Inf, in the derivative" if has_nan else "overflow in the derivative"


def _plain(name: str) -> str:
    """An operation's name without the underscore of its form in place."""
    return name.strip("_").removesuffix("_")


def _largest_of(dtype: torch.dtype) -> str:
    return f"{torch.finfo(dtype).max:.5g}, the largest of {NAMES.get(dtype, str(dtype))}"


def _any_nan(tensors: Iterable[torch.Tensor]) -> bool:
    return any(bool(entries(x).isnan().any()) for x in tensors)


def _any_infinite(tensors: Iterable[torch.Tensor]) -> bool:
    return any(bool(entries(x).isinf().any()) for x in tensors)


def _has(x: Any, test: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether an entry of an argument passes a test."""
    if isinstance(x, int | float):
        x = torch.tensor(float(x))
    if not isinstance(x, torch.Tensor) or x.dtype is torch.bool or x.device.type == "meta":
        return False
    return bool(test(entries(x)).any())
