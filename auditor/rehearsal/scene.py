"""Detects the existing models and optimizers that a training step uses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import LoadError
from ..loading.target import required_arguments


@dataclass
class Scene:
    """The objects that one step uses, by id: modules that it calls directly, and optimizers. own_regions: whether the
    step opens autocast regions. known: all modules and optimizers that existed before."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    own_regions: bool = False
    backward_passes: int = 0
    known: Mapping[int, nn.Module | Optimizer] = field(default_factory=dict)

    @property
    def group_numbers(self) -> dict[nn.Parameter, int]:
        """The optimizers' parameters, each with the number of its group."""
        groups = ((n, group) for one in self.optimizers.values() for n, group in enumerate(one.param_groups))
        return {p: n for n, group in groups for p in group["params"]}

    @cached_property
    def roots(self) -> dict[str, nn.Module]:
        """{prefix of parameter names: module}, for the outermost modules that contain parameters of an optimizer."""
        trained = {*map(id, self.group_numbers)}
        tops = [m for m in self.modules.values() if trained & {id(p) for p in m.parameters()}]
        found: list[nn.Module] = []
        for top in tops:
            around = [m for m in self.known.values() if isinstance(m, nn.Module) and any(x is top for x in m.modules())]
            outermost = max(around, key=lambda m: sum(1 for _ in m.modules()), default=top)
            found += [] if any(outermost is one for one in found) else [outermost]
        if len(found) == 1:
            return {"": found[0]}
        names = [type(one).__name__ for one in found]
        return {
            f"{name}{i if names.count(name) > 1 else ''}.": m
            for i, (name, m) in enumerate(zip(names, found, strict=True))
        }


def bad_step(message: str) -> LoadError:
    """The error for a step that cannot be rehearsed."""
    return LoadError(message, slug="bad-step")


def known_objects() -> dict[int, nn.Module | Optimizer]:
    """{id: object} of all modules and optimizers of this process, except those whose constructor failed."""
    return {
        id(one): one
        for one in gc.get_objects()
        if issubclass(type(one), nn.Module | Optimizer) and not {"_modules", "param_groups"}.isdisjoint(vars(one))
    }


def call_step(step: Callable[..., Any], batch: Any) -> Any:
    """Call the user's step with a batch: as one argument, several, or none, as its signature requires."""
    names = required_arguments(step)
    return step(*(batch if len(names) > 1 else [batch][: len(names)]))
