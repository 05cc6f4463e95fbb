"""What a model is, to the bit: a description, written for the tests alone, to compare before and after."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

Line = tuple[Any, ...]


def portrait(value: Any) -> list[Line]:
    """One line for every object that `value` leads to: the way there, which object it is, what it holds."""
    return [(path, id(held), type(held), _own(held)) for path, held in _walk("", value, set())]


def _walk(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    yield path, value
    if id(value) not in seen:
        seen.add(id(value))
        for name, child in _children(value):
            yield from _walk(f"{path}/{name}", child, seen)


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None if is_lazy(value) else _tensor(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    return value if isinstance(value, int | float | str | bytes | bytearray | None) else None


def _tensor(value: torch.Tensor) -> Line:
    storage = value.untyped_storage()
    where = storage._cdata, storage.nbytes(), value.storage_offset(), value.shape, value.stride(), value.dtype
    hooks = [list(held or ()) for held in (value._backward_hooks, value._post_accumulate_grad_hooks)]
    return *where, value.requires_grad, value.is_leaf, hooks, bytes(storage.tolist())


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, torch.Tensor) and value.is_leaf:
        yield "grad", value.grad
    if isinstance(value, dict):
        items = OrderedDict.items if isinstance(value, OrderedDict) else dict.items  # each has an order of its own
        yield from ((f"[{key if isinstance(key, str) else id(key)}]", child) for key, child in items(value))
    if isinstance(value, list | tuple | deque | set):
        yield from enumerate(value)
    for name in getattr(type(value), "__slots__", ()):
        yield name, getattr(value, name, "unset")
    if not isinstance(value, type):
        yield from list(getattr(value, "__dict__", {}).items())
    if type(value).__module__.startswith("tests."):
        yield from ((f"class.{name}", held) for name, held in vars(type(value)).items() if not callable(held))
