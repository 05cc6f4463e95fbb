"""Notices when Python reads a tensor's values: the path it takes from there holds for these inputs only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_METHODS = ("tolist", "numpy", "__array__")
"""Ways to the values that pass no operation."""


@contextmanager
def noticed(tell: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """In the body `tell` hears of every tensor whose values are handed to Python past the dispatcher."""
    own = {name: vars(torch.Tensor)[name] for name in _METHODS if name in vars(torch.Tensor)}
    for name in _METHODS:
        setattr(torch.Tensor, name, _telling(getattr(torch.Tensor, name), tell))
    try:
        yield
    finally:
        for name in _METHODS:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)


def _telling(method: Callable[..., Any], tell: Callable[[torch.Tensor], None]) -> Callable[..., Any]:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tell(self)
        return method(self, *args, **kwargs)

    return read
