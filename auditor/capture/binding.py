"""Inputs of a recorded graph: the model's tensors, a batch's tensors, and constants of the recorded run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..numerics.nodes import tensors_of
from ..records import Batch


class RecordedModule(fx.GraphModule):
    """A GraphModule that is interpreted and generates no Python, so that arguments may be of any type."""

    def recompile(self) -> Any:
        """Does nothing."""
        return None

    def forward(self, *args: Any) -> Any:
        """Replay the recorded run on other values."""
        return fx.Interpreter(self).run(*args)


@dataclass(frozen=True)
class Binder:
    """Collects a graph's inputs for a model and a batch: {placeholder: state-dict name | constant}, in order."""

    order: tuple[str, ...]
    names: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    keywords: tuple[str, ...]

    def __call__(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Tensors in placeholder order; parameters and buffers are the model's own, not copies."""
        args, kwargs = batch
        keywords = (*(k for k in self.keywords if k in kwargs), *(k for k in kwargs if k not in self.keywords))
        inputs = iter({id(x): x for x in tensors_of((args, {key: kwargs[key] for key in keywords}))}.values())
        result = []
        for name in self.order:
            if name in self.constants:
                result.append(self.constants[name])
            elif name in self.names:
                result.append(tensor_at(model, self.names[name]))
            else:
                result.append(next(inputs))
        return result


def tensor_at(model: nn.Module, path: str) -> torch.Tensor:
    """A parameter or buffer by its name in the state dict; module names may contain any characters."""
    module: Any = model
    *parents, name = path.split(".")
    for part in parents:
        module = module._modules[part]
    tensor: torch.Tensor = (module._parameters if name in module._parameters else module._buffers)[name]
    return tensor


def named_inputs(model: nn.Module, batch: Batch) -> dict[int, str]:
    """{id of a tensor: its name in the forward}; tensors inside an argument are numbered."""
    args, kwargs = batch
    try:
        bound: dict[str, Any] = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # scripted modules have no signature
        bound = {f"input_{i}": x for i, x in enumerate(args)} | kwargs
    result: dict[int, str] = {}
    for name, value in bound.items():
        tensors = tensors_of(value)
        for index, x in enumerate(tensors):
            result.setdefault(id(x), name if value is x else f"{name}_{index}")
    return result
