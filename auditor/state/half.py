"""What a model stores in FP16 and BF16, raised in place. Everything from LOW on is copied into every `patched_model.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .members import modules_of, named_tensors

LOW = (torch.float16, torch.bfloat16)
OWN = frozenset(vars(nn.Module()))  # attributes that torch keeps in every module


def stored_low(model: nn.Module, attributes: bool = False) -> list[torch.Tensor]:
    """Parameters and buffers in FP16 or BF16, each once; attributes: also what modules hold without registering it."""
    held: list[Any] = [x for _, x in named_tensors(model)]
    if attributes:
        named = [item for module in modules_of(model) for item in vars(module).items()]
        held += pytree.tree_leaves([value for name, value in named if name not in OWN])
    return [x for x in {id(x): x for x in held}.values() if isinstance(x, torch.Tensor) and is_plainly_low(x)]


def is_plainly_low(x: torch.Tensor) -> bool:
    """Whether a tensor's own memory holds its entries in FP16 or BF16: not so of lazy, sparse and wrapping ones."""
    known = not nn.parameter.is_lazy(x) and not hasattr(type(x), "__tensor_flatten__")
    return known and x.dtype in LOW and x.layout is torch.strided


def raise_in_place(tensors: list[torch.Tensor]) -> None:
    """Hold FP16 and BF16 tensors in FP32: the same objects and values; what lay on one storage does so again."""
    together: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for x in filter(is_plainly_low, tensors):
        together.setdefault((x.untyped_storage()._cdata, x.dtype), []).append(x)
    for sharing in together.values():
        first = sharing[0]
        with torch.inference_mode(first.is_inference()):  # what was made in that mode can hold nothing else
            if len(sharing) == 1:
                first.data = first.data.float()
                continue
            whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage()).float()
            for x in sharing:
                x.data = whole.as_strided(x.shape, x.stride(), x.storage_offset())
