"""Checkpoints: read without running code, fitted onto the model, and a watch for whether any was read at all."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import LoadError
from ..formats.entries import entries
from ..isolation.process import swapped
from . import statedicts
from .statedicts import few

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
    """Loads the checkpoint at `path` into `model`. What there is to say of what it holds.

    Raises: LoadError(slug="missing-weights" | "bad-weights" | "weights-mismatch").
    """
    if not path.is_file():
        raise LoadError(f"weights {path} do not exist: check --weights", slug="missing-weights")
    with refused():
        content = statedicts.read_checkpoint(path)
    with refused("weights-mismatch"):
        state = statedicts.load_state(model, content, path.name)
    return [*_rounding_notes(state, model, path.name), *_other_notes(content, state, model, path.name)]


def _rounding_notes(state: Mapping[str, Any], model: nn.Module, file: str) -> list[str]:
    """Weights that a model holds in another floating dtype than its checkpoint."""
    own, found = model.state_dict(), dict[tuple[torch.dtype, torch.dtype], None]()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name in own:
            found[value.dtype, own[name].dtype] = None
    return [
        f"{file} holds weights in {_name(given)}, and the model in {_name(held)}: "
        + ("their values are exact" if torch.promote_types(given, held) is held else "they were rounded to it")
        for given, held in found
        if given is not held
    ]


def _other_notes(content: Mapping[str, Any], state: Mapping[str, Any], model: nn.Module, file: str) -> list[str]:
    """What only the checkpoint has, beside this model, and extra state that only the model has."""
    loaded = {id(value) for value in state.values()}
    beside = [name for name, value in content.items() if id(value) not in loaded]
    lacking = [name for name in model.state_dict() if statedicts.is_extra(name) and name not in state]
    notes = [f"{file} also holds {few(beside)}, which the model does not have: left out"] if beside else []
    return notes + ([f"{file} does not hold {few(lacking)}: the factory's are used"] if lacking else [])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def refused(slug: str = "bad-weights") -> Iterator[None]:
    """What the body says of a checkpoint becomes a LoadError."""
    try:
        yield
    except ValueError as error:
        raise LoadError(str(error), slug) from error


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
