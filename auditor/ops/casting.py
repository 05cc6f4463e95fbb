"""Values in another precision: raised to float32, lowered to a format, and an operation computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..formats.carried import carried_in, in_format, plain
from ..formats.table import Format, is_low
from ..trees import over_tensors


def in_float32(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """Compute in float32 on the values the arguments have now, and round floating results to the format."""
    args, kwargs = raised(args), raised(kwargs)
    return lowered(target(*args, **kwargs), row)


def raised(tree: Any) -> Any:
    """Low tensors of `tree` as float32; the rest as it is."""
    return over_tensors(lambda x: plain(x).float() if is_low(x.dtype) or carried_in(x) is not None else x, tree)


def lowered(tree: Any, row: Format) -> Any:
    """Float32 and low tensors of `tree` in a format; float64, complex and discrete ones as they are."""
    return over_tensors(lambda x: in_format(x, row) if x.dtype is torch.float32 or is_low(x.dtype) else x, tree)
