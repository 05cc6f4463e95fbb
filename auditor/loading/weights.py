"""Checkpoints: read without running code, fitted onto the model, and a watch for whether any was read at all."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import LoadError
from ..formats.entries import entries
from ..state.process import swapped

WRAPPERS = ("module.", "_orig_mod.", "model.")
CONTAINERS = ("state_dict", "model_state_dict", "model", "weights")
READERS = (
    ("torch", "load"),
    ("safetensors", "safe_open"),
    ("safetensors.torch", "load_file"),
    ("transformers.modeling_utils", "safe_open"),
)


class WeightWatch:
    """Notes what loads weights while the user's code runs. `phase` is "import", then "build"."""

    def __init__(self) -> None:
        self.phase = "import"
        self.restored = False
        self.trained = False
        self.phases_with_reads: set[str] = set()

    def loaded(self, kind: str) -> bool:
        """Whether a model of this kind of origin got its weights from somewhere.

        Restoring a state dict says so, and an optimiser's step; reading a file does only where the model itself was
        being made, since inputs are read from files too.
        """
        made_in = {"instance": "import", "factory": "build", "class": "build"}.get(kind)
        return self.restored or self.trained or made_in in self.phases_with_reads

    def stepped(self, *_: Any) -> None:
        """An optimiser has changed parameters."""
        self.trained = True


_active: WeightWatch | None = None


@contextmanager
def watching() -> Iterator[WeightWatch]:
    """Watches `load_state_dict` and the functions that read checkpoints; names the user imported keep working after."""
    global _active
    watch = WeightWatch()
    _active = watch
    try:
        with ExitStack() as stack:
            restore = _noted(nn.Module.load_state_dict, restores=True)
            stack.enter_context(swapped(nn.Module, "load_state_dict", restore))
            stack.callback(register_optimizer_step_post_hook(watch.stepped).remove)
            for module_name, name in READERS:
                module = sys.modules.get(module_name)
                if module is not None and name in vars(module):
                    stack.enter_context(swapped(module, name, _noted(getattr(module, name))))
            yield watch
    finally:
        _active = None


def _noted(function: Callable[..., Any], restores: bool = False) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _active is not None:
            _active.restored |= restores
            _active.phases_with_reads.add(_active.phase)
        return function(*args, **kwargs)

    return wrapper


def load_into(model: nn.Module, path: Path) -> list[str]:
    """Loads the checkpoint at `path` into `model`; tied weights may be stored once. What there is to say of its dtypes.

    Raises: LoadError(slug="missing-weights" | "bad-weights" | "weights-mismatch").
    """
    state = _unwrapped(read_checkpoint(path), model)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if "size mismatch" in line), lines[-1])
        raise LoadError(f"{path.name} does not fit the model: {reason}", slug="weights-mismatch") from error
    tied = _aliases(model, set(state))
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        parts = [f"{len(names)} {kind} ({few(names)})" for kind, names in _named(missing, unexpected) if names]
        raise LoadError(
            f"{path.name} does not fit the model: {' and '.join(parts)}; give the checkpoint of this very model",
            slug="weights-mismatch",
        )
    return _rounding_notes(state, model, path.name)


def _rounding_notes(state: Mapping[str, Tensor], model: nn.Module, file: str) -> list[str]:
    """Weights that a model holds in another floating dtype than its checkpoint."""
    own, found = model.state_dict(), dict[tuple[torch.dtype, torch.dtype], None]()
    for name, value in state.items():
        if value.is_floating_point() and name in own and own[name].dtype is not value.dtype:
            found[value.dtype, own[name].dtype] = None
    return [
        f"{file} holds weights in {_name(given)}, and the model in {_name(held)}: "
        + ("their values are exact" if torch.promote_types(given, held) is held else "they were rounded to it")
        for given, held in found
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The state dict in a safetensors file, a sharded one's index, or a torch file (never unpickling objects)."""
    if not path.is_file():
        raise LoadError(f"weights {path} do not exist: check --weights", slug="missing-weights")
    if path.name.endswith(".safetensors.index.json"):
        shards = shards_of(path)
        return {k: v for shard in shards for k, v in read_checkpoint(path.parent / shard).items()}
    value = read_tensors(path)
    for container in CONTAINERS:
        if isinstance(value, Mapping) and isinstance(value.get(container), Mapping):
            value = value[container]
    tensors = {k: v for k, v in value.items() if isinstance(v, Tensor)} if isinstance(value, Mapping) else {}
    if not tensors:
        raise LoadError(f"{path.name} holds no state dict: save model.state_dict()", slug="bad-weights")
    return tensors


def shards_of(index: Path) -> list[str]:
    """The files that an index of shards names. Raises: LoadError(slug="bad-weights")."""
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not files or not all(isinstance(file, str) for file in files):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(
            f"{index.name} has no weight_map of files: take the index that was saved", "bad-weights"
        ) from error
    return files


def read_tensors(path: Path, mapped: bool = False) -> Any:
    """What a .safetensors or torch file holds, on the CPU. mapped: nothing of it is read into memory where its layout
    allows that. Raises: LoadError(slug="bad-weights")."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        mapped = mapped and is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except safetensors.SafetensorError as error:
        raise LoadError(f"{path.name} is not a safetensors file: {error}", slug="bad-weights") from error
    except Exception as error:
        hint = "save plain tensors with torch.save(model.state_dict(), ...) or as safetensors"
        raise LoadError(f"{path.name} cannot be read without running code: {hint}", slug="bad-weights") from error


def reject_non_finite(model: nn.Module) -> None:
    """Raises: LoadError(slug="nan-weights"). Infinite buffers pass: attention masks hold them."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    for name, tensor in named:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        held = entries(tensor.detach())
        if type(held) is Tensor and bool(held.sum().isfinite()):  # else the sum is not, and it takes no memory
            continue
        bad = ~held.isfinite() if isinstance(tensor, nn.Parameter) else held.isnan()
        if count := int(bad.sum()):
            hint = "restore a checkpoint from before training diverged"
            raise LoadError(f"{name} holds {count} NaN or infinite values of {tensor.numel()}: {hint}", "nan-weights")


def _unwrapped(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Drops the prefixes that DDP, torch.compile and training loops add, unless the model's own keys have them."""
    own = model.state_dict().keys()
    while True:
        prefix = next((p for p in WRAPPERS if all(key.startswith(p) for key in state)), None)
        if prefix is None or any(key.startswith(prefix) for key in own):
            return state
        state = {key.removeprefix(prefix): value for key, value in state.items()}


def _aliases(model: nn.Module, loaded: set[str]) -> set[str]:
    """Names of tensors that share their storage with one that was loaded."""
    tensors = model.state_dict(keep_vars=True)
    identities = {id(tensors[name]) for name in loaded if name in tensors}
    return {name for name, tensor in tensors.items() if id(tensor) in identities}


def _named(missing: list[str], unexpected: list[str]) -> tuple[tuple[str, list[str]], ...]:
    return ("missing", missing), ("unexpected", unexpected)


def few(names: list[str]) -> str:
    """The first three of them."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
