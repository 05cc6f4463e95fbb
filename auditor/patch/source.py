"""How a patched model finds its source and its checkpoint. Like the runtime, it is copied into every patched file."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..loading.importer import as_script, import_source, locate, root_of
from ..runs.wrapped import unwrapped

PREFIXES = ("module.", "_orig_mod.", "model.")
SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
CONTAINERS = ("state_dict", "model_state_dict", "model", "weights")


def make_original(source: dict[str, Any], file: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """The model as its own source makes it. file: the path of patched_model.py.

    Raises: ValueError or FileNotFoundError where the source or the checkpoint is not what it was.
    """
    with imported(source, file) as made:
        for part in source["symbol"].split("."):
            if not hasattr(made, part):
                raise ValueError(
                    f"{source['path'] or source['module']} has no {source['symbol']!r} any more: audit it again, or edit "
                    f"SOURCE in {file}"
                )
            made = getattr(made, part)
        if source["kind"] != "instance":
            folder = (str(locate(source["folder"], file)),) if source.get("folder") and not args else ()
            made = made(*folder, *(args or source["init_args"]), **(kwargs or source["init_kwargs"]))
        else:
            made = copied(made)
        model: nn.Module = made["model"] if source["kind"] == "spec" else made
    if source["weights"]:
        load_weights(unwrapped(model), locate(source["weights"], file))
    return model


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model that the source holds, so that it can be built again; what cannot be copied is that model itself."""
    try:
        return copy.deepcopy(model)
    except Exception:
        return model


@contextmanager
def imported(source: dict[str, Any], file: str) -> Iterator[Any]:
    """The user's module, in the body with the `sys.path` and `sys.argv` that the audit had."""
    name, path = source["module"] or Path(source["path"]).stem, None
    folders = [Path(file).resolve().parent / source["working_directory"]] if source["working_directory"] else []
    if source["path"]:
        path = locate(source["path"], file, source["digest"])
        folders = [Path(root_of(name, path)), *folders, path.parent]
    with as_script(str(path or name), [str(folder.resolve()) for folder in folders]):
        yield import_source(name, path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the checkpoint that the audit was run with; tied weights may be stored once. Raises: ValueError."""
    own = model.state_dict(keep_vars=True)
    state = unprefixed(read_checkpoint(path), set(own))
    loaded = {id(own[name]) for name in state if name in own}
    wrong = [name for name, value in own.items() if name not in state and id(value) not in loaded]
    wrong += [name for name, value in state.items() if name not in own or value.shape != own[name].shape]
    if wrong:
        raise ValueError(f"{path} does not fit the model, at {wrong[0]!r}: give the checkpoint of this very model")
    model.load_state_dict(state, strict=False)


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, from safetensors, the index of a sharded one, or a torch file; no code of it is run."""
    if path.name.endswith(".safetensors.index.json"):
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        return {name: value for shard in shards for name, value in read_checkpoint(path.parent / shard).items()}
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    for container in CONTAINERS:
        if isinstance(content.get(container), dict):
            content = content[container]
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The format is a length in 8 bytes, a JSON header of that length, and the values, little-endian, without gaps.

    Source: huggingface.co/docs/safetensors, "Format". Read here so that nothing but torch is needed.
    """
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            flat = torch.empty(last - first, dtype=torch.uint8)
            if last > first:
                flat = torch.frombuffer(bytearray(content[start + first : start + last]), dtype=torch.uint8)
            found[name] = flat.view(SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
    return found


def unprefixed(state: dict[str, torch.Tensor], own: set[str]) -> dict[str, torch.Tensor]:
    """State-dict names without what DDP, torch.compile and training loops put before all of them."""
    while True:
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in state)), None)
        if not state or prefix is None or any(name.startswith(prefix) for name in own):
            return state
        state = {name.removeprefix(prefix): value for name, value in state.items()}
