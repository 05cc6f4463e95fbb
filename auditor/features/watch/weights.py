"""The weights of a model for a capsule, and back into a model: by name, frozen ones by reference to their file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import LoadError
from .capsule import Capsule, digest_of
from .encoding import local

PREFIXES = ("module.", "_orig_mod.")
"""Parts of names that DistributedDataParallel and `torch.compile` add."""


def bare(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel or DataParallel; others as they are."""
    kinds = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, kinds):
        model = model.module
    return model


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix).replace(f".{prefix}", ".")
    return name


class FrozenFiles:
    """Files with weights that are not trained. files: paths given by the user."""

    def __init__(self, files: Any) -> None:
        given = files if isinstance(files, list | tuple) else [] if files is None else [files]
        self._given = [Path(file) for file in given]
        self._known: dict[str, tuple[str, str] | None] = {}  # {name: (file, SHA-256)}

    def reference(self, name: str, x: torch.Tensor, model: nn.Module) -> tuple[str, str] | None:
        """(file, SHA-256) of a weight that a file contains with the same values; None without such a file."""
        if name not in self._known:
            self._known[name] = self._look_up(name, x, model)
        return self._known[name]

    def _look_up(self, name: str, x: torch.Tensor, model: nn.Module) -> tuple[str, str] | None:
        for file in (*self._given, *_files_of(x, model)):
            stored = _entry(file, name)
            if stored is not None and stored.shape == x.shape and stored.dtype == x.dtype:
                host = x.detach().cpu()
                if torch.equal(stored, host):
                    return str(file.resolve()), digest_of(host)
        return None


def _files_of(x: torch.Tensor, model: nn.Module) -> Iterator[Path]:
    """Files that the weight may come from: the one that is mapped into memory, and those of a Hugging Face folder."""
    mapped = getattr(x.untyped_storage(), "filename", None)
    if mapped:
        yield Path(mapped)
    folder = getattr(getattr(model, "config", None), "_name_or_path", "")
    if folder and Path(folder).is_dir():
        yield from sorted((*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin")))


def _entry(file: Path, name: str) -> torch.Tensor | None:
    """The tensor of a weight file with this name, or the only one whose name ends with it or that it ends with."""
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, "pt") as opened:
                match = _match(list(opened.keys()), name)
                stored: torch.Tensor | None = None if match is None else opened.get_tensor(match)
                return stored
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception:
        return None
    while isinstance(state, Mapping) and not any(isinstance(x, torch.Tensor) for x in state.values()):
        inner = next((x for x in state.values() if isinstance(x, Mapping)), None)
        if inner is None:
            return None
        state = inner
    match = _match(list(state), name)
    value = None if match is None else state[match]
    return value if isinstance(value, torch.Tensor) else None


def _match(names: Sequence[str], name: str) -> str | None:
    if name in names:
        return name
    close = [one for one in names if one.endswith(f".{name}") or name.endswith(f".{one}")]
    return close[0] if len(close) == 1 else None


def state_of_model(
    model: nn.Module, files: FrozenFiles
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, str]], tuple[str, ...]]:
    """(weights on the CPU, references to frozen weights, names of weights of which this rank has a part)."""
    weights: dict[str, torch.Tensor] = {}
    frozen: dict[str, tuple[str, str]] = {}
    sharded: list[str] = []
    for given, p in model.named_parameters():
        name = plain_name(given)
        part = local(p).detach()
        if part is not p and callable(getattr(p, "to_local", None)):
            sharded.append(name)
        reference = None if p.requires_grad else files.reference(name, part, model)
        if reference is not None:
            frozen[name] = reference
        else:
            weights[name] = part.cpu().clone()
    return weights, frozen, tuple(sharded)


def load_weights(capsule: Capsule, model: nn.Module) -> None:
    """Set the model's weights, buffers and modes to the capsule's. Raises: LoadError(slug="bad-capsule") if they do not fit,
    or a file with frozen weights has other ones."""
    parameters = {plain_name(name): p for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in parameters.items():
            if name in capsule.frozen:
                _load_frozen(name, p, *capsule.frozen[name])
            else:
                _copy(name, p, capsule.weights[name])
            if p.is_floating_point() and capsule.about.trained:
                p.requires_grad_(name in capsule.about.trained)
        for given, buffer in model.named_buffers():
            name = plain_name(given)
            if name in capsule.buffers and buffer.shape == capsule.buffers[name].shape:
                buffer.copy_(capsule.buffers[name])
    for path, module in model.named_modules():
        module.training = plain_name(path) not in capsule.about.evaluated


def load_beside(capsule: Capsule, modules: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> None:
    """Set the other modules that the step reads, by variable, and the parameters that optimizers alone know."""
    with torch.no_grad():
        for place, module in modules.items():
            stored = capsule.beside.get(place, {})
            for given, x in (*module.named_parameters(), *module.named_buffers()):
                _copy_if_alike(x, stored.get(plain_name(given)))
        for name, x in capsule.others.items():
            number, _, position = name.partition(".")
            parameters = _parameters_of(optimizers, int(number))
            if int(position) < len(parameters):
                _copy_if_alike(parameters[int(position)], x)


def _parameters_of(optimizers: Sequence[Any], number: int) -> list[torch.Tensor]:
    if number >= len(optimizers):
        return []
    return [p for group in optimizers[number].param_groups for p in group["params"]]


def _copy_if_alike(x: torch.Tensor, stored: torch.Tensor | None) -> None:
    if stored is not None and stored.shape == x.shape:
        x.data.copy_(stored)


def _copy(name: str, p: torch.Tensor, stored: torch.Tensor) -> None:
    if p.shape != stored.shape:
        said = f"{name} has shape {list(p.shape)}, in the capsule {list(stored.shape)}"
        raise LoadError(f"{said}: build the model as in the training", "bad-capsule")
    if p.dtype is not stored.dtype:
        p.data = p.data.to(stored.dtype)
    p.data.copy_(stored)


def _load_frozen(name: str, p: torch.Tensor, file: str, digest: str) -> None:
    if digest_of(p) == digest:
        return
    stored = _entry(Path(file), name)
    if stored is None or digest_of(stored) != digest:
        said = f"the frozen weight {name} came from {file}, which is missing here or has other values"
        raise LoadError(f"{said}: load the same file in the training script, or put it there", "bad-capsule")
    _copy(name, p, stored)


def fits(capsule: Capsule, model: nn.Module) -> bool:
    """Whether the model has the capsule's parameters, by name and shape."""
    try:
        shapes = {plain_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    except Exception:  # a module whose __init__ did not finish
        return False
    if shapes.keys() != {*capsule.weights, *capsule.frozen}:
        return False
    return all(shapes[name] == tuple(x.shape) for name, x in capsule.weights.items())


def merge(capsules: Sequence[Capsule]) -> dict[str, torch.Tensor]:
    """The whole weights from the parts of all ranks, in order: parts of the first dimension."""
    whole = dict(capsules[0].weights)
    for name in capsules[0].about.sharded:
        whole[name] = torch.cat([one.weights[name] for one in capsules])
    return whole
