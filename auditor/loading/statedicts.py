"""Reads checkpoints without running code, and loads them. `patched_model.py` copies this code from `PREFIXES` on."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

PREFIXES = ("module.", "_orig_mod.", "model.")
CONTAINERS = ("state_dict", "model_state_dict", "model", "weights", "params_ema", "params", "net", "generator")
HARMLESS = (argparse.Namespace, types.SimpleNamespace, io.BytesIO, PosixPath, PurePosixPath)


def load_state(model: nn.Module, content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Load the result of `read_checkpoint`; tied weights may be stored once. Returns weights by the model's names.

    If no name matches, prefixes of DDP, torch.compile or training loops are removed; entries without the prefix, such
    as a loss's weights, are then dropped. Raises: ValueError if the checkpoint does not fit the model.
    """
    own, state = model.state_dict(keep_vars=True), dict(content)
    while state and state.keys().isdisjoint(own):
        prefix = next((prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in state)), None)
        if prefix is None:
            state = dict(content)
            break
        state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except Exception as error:  # a module's set_extra_state may raise anything
        lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines()]
        reason = next((line for line in lines if "size mismatch" in line), lines[-1])
        raise ValueError(f"{file} does not fit the model: {reason}") from error
    stored = {id(own[name]) for name in state if name in own}
    wrong = {
        "missing": [name for name in missing if not is_extra(name) and id(own.get(name)) not in stored],
        "unexpected": [name for name in unexpected if not is_extra(name)],
    }
    if any(wrong.values()):
        parts = [f"{kind} weights ({len(names)}: {few(names)})" for kind, names in wrong.items() if names]
        raise ValueError(f"{file} does not fit the model: {' and '.join(parts)}; give a checkpoint of this exact model")
    return state


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a state dict from safetensors, a torch file, or the index of a sharded checkpoint.

    Raises: FileNotFoundError; ValueError if the file cannot be read, or contains no state dict.
    """
    if path.name.endswith(".index.json") and path.is_file():
        try:
            files = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
            shards = [path.parent / file for file in files]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path.name} has no weight_map: give the index file that was saved with the shards"
            ) from error
        return {name: value for shard in shards for name, value in read_checkpoint(shard).items()}
    content = read_tensors(path)
    while isinstance(content, Mapping):
        inner = [content[key] for key in CONTAINERS if isinstance(content.get(key), Mapping)]
        if not inner:
            break
        content = inner[0]
    items = content.items() if isinstance(content, Mapping) else ()
    state = {name: value for name, value in items if isinstance(value, Tensor) or is_extra(name)}
    if not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path.name} contains no state dict: save model.state_dict()")
    return state


def read_tensors(path: Path) -> Any:
    """The content of a .safetensors or torch file on the CPU, memory-mapped if possible; code in the file never runs.

    Raises: FileNotFoundError; ValueError if the file cannot be read without running code.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: complete the checkpoint, or check --weights")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{path.name} cannot be read as a safetensors file: {reason}") from error
    try:
        with torch.serialization.safe_globals(harmless()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        holds = f", since it contains {named[1]}" if named else ""
        reason = (
            f"cannot be read without running code{holds}: save plain tensors, with torch.save(model.state_dict(), ...) "
            "or as safetensors"
        )
        if "TorchScript" in str(error):
            reason = (
                "is a TorchScript archive, which contains code: save only its weights, "
                "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')"
            )
        raise ValueError(f"{path.name} {reason}") from error


def harmless() -> list[Any]:
    """Classes and functions that checkpoints of training loops refer to, and that are safe to unpickle."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return list(HARMLESS)
    arrays = (numpy._core if hasattr(numpy, "_core") else numpy.core).multiarray
    dtypes = [kind for kind in vars(numpy.dtypes).values() if isinstance(kind, type)]
    names = [(name, where) for name in ("scalar", "_reconstruct") for where in ("numpy.core", "numpy._core")]
    functions = [(getattr(arrays, name), f"{where}.multiarray.{name}") for name, where in names]
    return [*HARMLESS, numpy.dtype, numpy.ndarray, *dtypes, *functions]


def is_extra(name: Any) -> bool:
    """Whether a state dict's entry is a module's extra state, which may be missing or superfluous in a checkpoint."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def few(names: list[str]) -> str:
    """The first three names as text, and `...` for more names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
