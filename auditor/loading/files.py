"""What `--inputs` may say: a function in a file, a file of tensors, or shapes written out."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import LoadError
from ..isolation.process import reseed
from ..records import Batch
from .inputs import Inputs, as_batches, bind_named, named_inputs
from .statedicts import read_tensors
from .synthesis import vocabulary
from .target import import_target, parse
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
    name = target.symbol or "get_inputs"
    module = import_target(target)
    if not hasattr(module, name):
        raise LoadError(f"{target.label} has no {name!r}: {GRAMMAR}", slug="missing-inputs")
    return named_inputs(getattr(module, name), f"{name}() in {target.label}")


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
