"""What a model consists of, as torch keeps it, whatever its class says. Copied into `patched_model.py` from named_modules on."""

from __future__ import annotations

import torch
from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under each of its paths, but for the endless ones that lead through a module to itself."""
    found: list[tuple[str, nn.Module]] = []
    waiting: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", model, ())]
    while waiting:
        path, module, above = waiting.pop()
        found.append((path, module))
        below = (*above, module)
        for name, child in reversed(list(module._modules.items())):
            if child is not None and not any(child is other for other in below):
                waiting.append((f"{path}.{name}" if path else name, child, below))
    return found


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Every module once, in the order of their first paths."""
    return list({id(module): module for _, module in named_modules(model)}.values())


def named_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter under each of its names."""
    return named_in(model, "_parameters")


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under each of its names."""
    return [*named_in(model, "_parameters"), *named_in(model, "_buffers")]


def named_in(model: nn.Module, store: str) -> list[tuple[str, torch.Tensor]]:
    """What the modules keep in this store of theirs, under each of its names."""
    return [
        (f"{path}.{name}" if path else name, tensor)
        for path, module in named_modules(model)
        for name, tensor in getattr(module, store).items()
        if tensor is not None
    ]


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter once."""
    return list({id(parameter): parameter for _, parameter in named_parameters(model)}.values())


def size_of(model: nn.Module) -> int:
    """Number of parameters, shared ones counted once. Raises: ValueError where a lazy layer has none so far."""
    for name, parameter in named_parameters(model):
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: call the model once, or load its weights, before it is patched")
    return sum(parameter.numel() for parameter in parameters_of(model))
