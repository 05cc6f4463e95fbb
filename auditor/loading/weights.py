"""Checkpoints fitted onto a model, a watch for whether any was read, and weights that are no numbers."""

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
from ..isolation.process import swapped
from ..numerics.entries import entries
from . import statedicts
from .state import name_of
from .statedicts import few

READERS = (
    ("torch", "load"),
    ("safetensors", "safe_open"),
    ("safetensors.torch", "load_file"),
    ("transformers.modeling_utils", "safe_open"),
)


@contextmanager
def watching() -> Iterator[set[str]]:
    """In the body, what gives weights is noted: a state dict "restored", a file "read", an optimiser that "trained"."""
    seen = set[str]()

    def noted(function: Callable[..., Any], event: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            seen.add(event)
            return function(*args, **kwargs)

        return wrapper

    readers = [(sys.modules.get(module), name, "read") for module, name in READERS]
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_post_hook(lambda *_: seen.add("trained")).remove)
        for holder, name, event in [(nn.Module, "load_state_dict", "restored"), *readers]:
            if holder is not None and name in vars(holder):
                stack.enter_context(swapped(holder, name, noted(getattr(holder, name), event)))
        yield seen


def load_into(model: nn.Module, path: Path) -> list[str]:
    """Loads the checkpoint at `path` into `model`. What there is to say of what it holds.

    Raises: LoadError(slug="missing-weights" | "bad-weights" | "weights-mismatch").
    """
    with refused(slug="bad-weights"):
        content = statedicts.read_checkpoint(path)
    with refused(slug="weights-mismatch"):
        state = statedicts.load_state(model, content, path.name)
    return list(_notes(content, state, model.state_dict(), path.name))


def _notes(content: Mapping[str, Any], state: Mapping[str, Any], own: Mapping[str, Any], file: str) -> Iterator[str]:
    """Dtypes that the model does not hold its weights in, and what only the checkpoint or only the model has."""
    both = [(value, own[name]) for name, value in state.items() if isinstance(value, Tensor) and name in own]
    for given, held in dict.fromkeys((x.dtype, y.dtype) for x, y in both if x.is_floating_point()):
        if given is not held:
            kept = "their values are exact" if torch.promote_types(given, held) is held else "they were rounded to it"
            yield f"{file} holds weights in {name_of(given)}, and the model in {name_of(held)}: {kept}"
    loaded = {id(value) for value in state.values()}
    if beside := [name for name, value in content.items() if id(value) not in loaded]:
        yield f"{file} also holds {few(beside)}, which the model does not have: left out"
    if lacking := [name for name in own if statedicts.is_extra(name) and name not in state]:
        yield f"{file} does not hold {few(lacking)}: the factory's are used"


@contextmanager
def refused(slug: str) -> Iterator[None]:
    """What the body says of a checkpoint becomes a LoadError."""
    try:
        yield
    except FileNotFoundError as error:
        raise LoadError(str(error), slug="missing-weights") from error
    except ValueError as error:
        raise LoadError(str(error), slug) from error


def reject_non_finite(model: nn.Module) -> None:
    """Raises: LoadError(slug="nan-weights"). Infinite buffers pass: attention masks hold them."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    for name, tensor in named:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        held = entries(tensor.detach())
        bad = ~held.isfinite() if isinstance(tensor, nn.Parameter) else held.isnan()
        if count := int(bad.sum()):
            hint = "restore a checkpoint from before training diverged"
            raise LoadError(f"{name} holds {count} NaN or infinite values of {tensor.numel()}: {hint}", "nan-weights")
