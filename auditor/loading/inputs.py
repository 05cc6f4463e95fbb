"""Example inputs: where they come from, in which order, and how each form becomes a tuple of batches."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import LoadError
from ..isolation.process import reseed
from ..records import Batch
from .sandbox import call
from .synthesis import synthesise
from .typical import typical

MOST_BATCHES = 32
"""How many batches of an open-ended iterable (a generator, a DataLoader) are used."""

FORMS = (
    "return a tensor, a tuple of positional arguments, a dict of keyword arguments, or a list of such tuples or dicts"
)


@dataclass(frozen=True)
class Inputs:
    """Batches and where they came from; `synthetic` where the values mean nothing."""

    batches: tuple[Batch, ...]
    source: str
    synthetic: bool = False


def as_batches(value: Any, source: str, *, arrays: bool = False) -> tuple[Batch, ...]:
    """Reads example inputs in any of their forms.

    One call: a tensor, a tuple or list of positional arguments, a dict of keyword arguments, or the pair
    (tuple, dict). Several calls: a list of tuples or dicts, or an iterable that yields any form of one call. So a list
    of tensors is one call that takes several tensors; several calls of one tensor each are written [(a,), (b,)].
    arrays: those of NumPy stay what they are, instead of becoming tensors. Raises: LoadError(slug="bad-inputs").
    """
    if not arrays:
        value = tree_map_only(np.ndarray, torch.from_numpy, value)
    elif isinstance(value, np.ndarray):
        value = (value,)
    if isinstance(value, list) and value and all(isinstance(item, tuple | Mapping) for item in value):
        return tuple(_one_call(item, source) for item in value)
    if isinstance(value, Tensor | tuple | list | Mapping):
        return (_one_call(value, source),)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        batches = tuple(_one_call(item, source) for item in itertools.islice(value, MOST_BATCHES))
        if batches:
            return batches
    raise LoadError(f"{source} gave {_described(value)}: {FORMS}", slug="bad-inputs")


def from_module(module: ModuleType, where: str) -> Inputs | None:
    """`get_inputs()` or `example_inputs` (a value or a function) of the user's module."""
    for name in ("get_inputs", "example_inputs"):
        if (value := getattr(module, name, None)) is not None:
            return Inputs(named_inputs(value, f"{name}{'()' if callable(value) else ''} in {where}"), f"{where}:{name}")
    return None


def held_out_from_module(module: ModuleType, where: str) -> tuple[Batch, ...]:
    value = getattr(module, "get_eval_inputs", None)
    return named_inputs(value, f"get_eval_inputs() in {where}") if value is not None else ()


def named_inputs(value: Any, what: str) -> tuple[Batch, ...]:
    return as_batches(call(value, what, "inputs-raise") if callable(value) else value, what)


def from_model(model: nn.Module, seed: int) -> Inputs:
    """The model's own `example_input_array` or `dummy_inputs`, else values made up from its first weighted layer."""
    reseed(seed)
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return Inputs(as_batches(example, "model.example_input_array"), "model.example_input_array")
    dummy = _dummy_inputs(model)
    if dummy:
        return Inputs(as_batches(dummy, "model.dummy_inputs"), "model.dummy_inputs", synthetic=True)
    return declared(model, seed) or made_up(model)


def declared(model: nn.Module, seed: int) -> Inputs | None:
    """Values in the shapes that a model of timm or Hugging Face declares."""
    reseed(seed)
    found = typical(model)
    return Inputs((found[0],), found[1], synthetic=True) if found else None


def made_up(model: nn.Module) -> Inputs:
    batch, source = synthesise(model)
    return Inputs((batch,), source, synthetic=True)


def bind_named(model: nn.Module, tensors: Mapping[str, Any], source: str) -> Batch:
    """Gives named tensors to the arguments of `forward` called so; a lone tensor, or "0", "1" ..., go by order.

    Raises: LoadError(slug="bad-inputs").
    """
    parameters = forward_parameters(model)
    variadic = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    names = [name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if set(tensors) <= set(names) or variadic:
        return (), dict(tensors)
    keys = [key.removeprefix("arr_") for key in tensors]
    if all(key.isdecimal() for key in keys):
        return tuple(value for _, value in sorted(zip(map(int, keys), tensors.values(), strict=True))), {}
    if len(tensors) == 1:
        return tuple(tensors.values()), {}
    raise LoadError(
        f"{source} names {', '.join(tensors)} but forward takes {', '.join(names) or 'nothing'}: use its names",
        slug="bad-inputs",
    )


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    forward: Callable[..., Any] = model.forward
    return inspect.signature(forward).parameters


def _one_call(value: Any, source: str) -> Batch:
    reject_iterators(value, source)
    if isinstance(value, Mapping):
        return (), {str(name): item for name, item in value.items()}
    if isinstance(value, Tensor):
        return (value,), {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict):
        return value[0], dict(value[1])
    if isinstance(value, tuple | list):
        return tuple(value), {}
    raise LoadError(f"{source} gave {_described(value)}: {FORMS}", slug="bad-inputs")


def reject_iterators(arguments: Any, source: str) -> None:
    """A model is called many times. Raises: LoadError(slug="bad-inputs") where an argument is used up by the first call."""
    if any(isinstance(leaf, Iterator) for leaf in tree_leaves(arguments)):
        raise LoadError(
            f"{source} gave an iterator as an argument, which the first of many calls uses up: give a list of what it yields",
            slug="bad-inputs",
        )


def _dummy_inputs(model: nn.Module) -> Any:
    try:
        return getattr(model, "dummy_inputs", None)
    except Exception:  # a property that does not fit this architecture is as good as none
        return None


def _described(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
