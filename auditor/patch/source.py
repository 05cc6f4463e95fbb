"""How a patched model finds its source and its checkpoint. Like the runtime, it is copied into every patched file."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    made: Any = source_module(source, file)
    for part in source["symbol"].split("."):
        if not hasattr(made, part):
            where = source["module"] or located(source["path"], file)
            raise ValueError(f"{where} has no {source['symbol']!r} any more: audit it again, or edit SOURCE in {file}")
        made = getattr(made, part)
    if source["kind"] != "instance":
        folder = (str(located(source["folder"], file)),) if source.get("folder") and not args else ()
        made = made(*folder, *(args or source["init_args"]), **(kwargs or source["init_kwargs"]))
    model: nn.Module = made["model"] if source["kind"] == "spec" else made
    if source["weights"]:
        load_weights(unwrapped(model), located(source["weights"], file))
    return model


def source_module(source: dict[str, Any], file: str) -> Any:
    """The user's module, imported from its file or by its name."""
    if source["module"]:
        return importlib.import_module(source["module"])
    path = located(source["path"], file)
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that its classes can be pickled
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def located(where: str, file: str) -> Path:
    """A file or a folder of the user's, from where `file` lies.

    If that has moved: the nearest to it, or to the working directory or a folder above, that ends as the path does.
    """
    here = Path(file).resolve().parent
    names = [name for name in Path(where).parts if name != ".."]
    folders = [here, *here.parents, Path.cwd(), *Path.cwd().parents]
    for path in (here / where, *(folder.joinpath(*names) for folder in folders)):
        if path.exists():
            return path.resolve()
    raise FileNotFoundError(
        f"{where} is not where it was as seen from {file}, nor below a folder that holds it or the working directory: "
        "audit the model again, or edit SOURCE there"
    )


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
