"""Notices when Python looks at a dtype, or at autocast: only then can what it writes depend on them."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from ..isolation.members import named_modules
from .importing import Importing

_TENSOR = torch.Tensor

TELLING: frozenset[Any] = frozenset(
    {
        _TENSOR.dtype.__get__,  # type: ignore[attr-defined]
        _TENSOR.itemsize.__get__,  # type: ignore[attr-defined]
        _TENSOR.nbytes.__get__,  # type: ignore[attr-defined]
        *(getattr(_TENSOR, name) for name in ("type", "element_size", "storage", "untyped_storage", "storage_type")),
        *(getattr(_TENSOR, name) for name in ("numpy", "__array__", "__dlpack__", "new", "new_tensor")),
        *(getattr(_TENSOR, name) for name in ("__repr__", "__format__", "__reduce_ex__", "__deepcopy__")),
        torch.result_type,
    }
)
"""Functions, as a mode of torch sees them, that say what dtype a tensor has, or make another in it."""

_ON = "is_autocast_enabled", "is_autocast_cpu_enabled"
_IN = "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype"
_SCRIPTED = torch._C.ScriptFunction, torch._C.ScriptMethod

_UNSEEN = re.compile(r"(?<![.\w])(?:is|get)_autocast_\w+|isinstance\s*\([^\n]*\b(?:Float|Half|BFloat16|Double)Tensor\b")
"""Questions that are put to torch past what is replaced and past every mode: in a function that a file imported, or by a
class of tensors."""


def may_ask_unseen(model: nn.Module, files: Iterable[str]) -> bool:
    """Whether Python may choose by a dtype without being noticed: a module when it is cast, or code in these files."""
    kinds = {kind for _, module in named_modules(model) for kind in type(module).__mro__}
    if any("_apply" in vars(kind) and not kind.__module__.startswith("torch.") for kind in kinds):
        return True
    return any(_UNSEEN.search("".join(linecache.getlines(file))) for file in files)


@contextmanager
def asking(tell: Callable[[], None]) -> Iterator[None]:
    """In the body `tell` hears of questions about autocast, and of scripted code, which asks without being seen."""
    asked = [*((torch, name) for name in _ON + _IN), *((kind, "__call__") for kind in _SCRIPTED)]
    own = [(holder, name, getattr(holder, name)) for holder, name in asked]

    def replace() -> None:
        for holder, name, was in own:
            setattr(holder, name, _telling(was, tell))

    def put_back() -> None:
        for holder, name, was in own:
            setattr(holder, name, was)

    @contextmanager
    def as_torch_has_them() -> Iterator[None]:
        put_back()
        try:
            yield
        finally:
            replace()

    # The compiler knows functions by what it read when it was imported, and breaks the graph at all others.
    compiler = Importing("torch._dynamo", as_torch_has_them)
    replace()
    compiler.begin()
    try:
        yield
    finally:
        compiler.end()
        put_back()


def _telling(function: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    @wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        tell()
        return function(*args, **kwargs)

    return asked
