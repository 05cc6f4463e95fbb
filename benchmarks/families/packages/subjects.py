"""The registry of models by `package/model`, and what their builders share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import Built

Build = Callable[[], Built]
SUBJECTS: dict[str, Build] = {}


def subject(name: str) -> Callable[[Build], Build]:
    """Registers a builder, which imports its package itself."""

    def register(build: Build) -> Build:
        SUBJECTS[name] = build
        return build

    return register


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape)


def integers(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


def edges(nodes: int = 12, count: int = 40) -> Tensor:
    """Edges of a random graph: [2, count]."""
    return torch.randint(0, nodes, (2, count))
