"""Example inputs: where they come from, what `--inputs` may say, and how each form becomes a tuple of batches."""

from __future__ import annotations

import inspect
import itertools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
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
from .statedicts import read_tensors
from .synthesis import synthesise, typical, vocabulary
from .target import named_in, parse
from .weights import refused

_SHAPE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*):)?(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d,]*)\](?:<(?P<limit>\d+))?")
LONGEST = 4000
"""Characters that a path may have on the systems we know."""
GRAMMAR = "write f.py:func, x.pt, x.safetensors, x.npz, or shapes such as 'x:float32[1,3,224,224] ids:int64[1,16]<1000'"


def from_argument(text: str, model: nn.Module, seed: int) -> Inputs:
    """Inputs as `--inputs` names them.

    Raises: LoadError(slug="missing-inputs" | "bad-inputs").
    """
    if _looks_like_shapes(text):
        reseed(seed)
        return Inputs((_from_shapes(text, model),), f"--inputs {text}", synthetic=True)
    if len(text) > LONGEST:
        raise LoadError(f"--inputs is {len(text)} characters long: {GRAMMAR}", slug="bad-inputs")
    path = Path(text)
    if path.suffix in (".pt", ".pth", ".safetensors", ".npz"):
        if not path.is_file():
            raise LoadError(f"inputs {path} do not exist: check --inputs", slug="missing-inputs")
        return Inputs(_from_file(path, model), f"--inputs {text}")
    if ".py" not in text and ":" not in text:
        raise LoadError(f"cannot read --inputs {text!r}: {GRAMMAR}", slug="bad-inputs")
    return Inputs(_from_function(text), f"--inputs {text}")


def _from_function(text: str) -> tuple[Batch, ...]:
    target = parse(text)
    target = replace(target, symbol=target.symbol or "get_inputs")
    return named_inputs(named_in(target, GRAMMAR, "missing-inputs"), f"{target.symbol}() in {target.label}")


def _from_file(path: Path, model: nn.Module) -> tuple[Batch, ...]:
    with refused():
        value = _read_npz(path) if path.suffix == ".npz" else read_tensors(path)
    if isinstance(value, Mapping) and all(isinstance(item, Tensor) for item in value.values()):
        return (bind_named(model, value, path.name),)
    return as_batches(value, path.name)


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _single(torch.from_numpy(arrays[name])) for name in arrays.files}
    except (ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise LoadError(f"{path.name} cannot be read as plain arrays: {error}", slug="bad-inputs") from error


def _single(tensor: Tensor) -> Tensor:
    """NumPy's default float64 is rarely what a model takes."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _looks_like_shapes(text: str) -> bool:
    parts = text.split()
    return bool(parts) and all(_SHAPE.fullmatch(part) for part in parts)


def _from_shapes(text: str, model: nn.Module) -> Batch:
    matches = [match for part in text.split() if (match := _SHAPE.fullmatch(part))]
    try:
        values = [_values(match, model) for match in matches]
    except (RuntimeError, ValueError, OverflowError) as error:  # no memory for it, or a limit that leaves no number
        reason = str(error).partition("\n")[0]
        raise LoadError(f"--inputs {text!r} cannot be made: {reason}", slug="bad-inputs") from error
    names = [match["name"] for match in matches]
    if not any(names):
        return tuple(values), {}
    if not all(names):
        raise LoadError(f"--inputs {text!r} names some shapes only: name all or none", slug="bad-inputs")
    return bind_named(model, dict(zip(names, values, strict=True)), "--inputs")


def _values(match: re.Match[str], model: nn.Module) -> Tensor:
    """Standard normal floats; integers below the limit, else below the model's vocabulary; masks of ones."""
    dtype: Any = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"{match['dtype']!r} is no dtype of torch: write float32, int64, bool ...", slug="bad-inputs")
    shape = tuple(int(size) for size in match["shape"].split(",") if size)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.float32 if dtype.is_floating_point else dtype).to(dtype)
    if match["limit"]:
        return torch.randint(int(match["limit"]), shape).to(dtype)
    if dtype == torch.bool or "mask" in (match["name"] or ""):
        return torch.ones(shape, dtype=dtype)
    return torch.randint(vocabulary(model), shape).to(dtype)


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
