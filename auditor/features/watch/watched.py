"""What a recorder watches: the objects of a training, and the state that its steps read."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .before import Buffers, Called, called, has_no_entries
from .capsule import Code
from .encoding import local
from .generators import own_generators, state_of_process, states_of
from .hooks import Several, inner
from .reads import Place, places_read
from .variables import Variables
from .weights import FrozenFiles, bare

LARGE = 64 << 20
"""Size in bytes from which another module is not saved if it never changes: the user's file loads it, as in the training."""


class Watched:
    """The models, optimizers and scalers of a training, and the function of its step, if it has one.

    model: the one that is trained, or all of them as `Several`. beside: {variable: module} of other modules that the
    step reads, such as a criterion or a teacher.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], scalers: Sequence[Any], frozen: Any) -> None:
        self.model = bare(model)
        self.models = [bare(one) for one in model] if isinstance(model, Several) else [self.model]
        self.optimizers = [inner(one) for one in optimizers]
        self.scalers = list(scalers)
        self.frozen = FrozenFiles(frozen)
        self.is_sharded = any(_is_sharded(p) for p in self.model.parameters())
        self.function: Callable[..., Any] | None = None
        self.code: Code | None = None
        self.beside: dict[str, nn.Module] = {}
        self.buffers: dict[str, Buffers] = {}
        self._marks: dict[str, list[float]] = {}
        self._own: dict[str, Any] = {}
        self._variables = Variables([], nn.Module())

    def name_step(self, function: Callable[..., Any]) -> None:
        """The step is this function."""
        self.function = inspect.unwrap(function)
        self.code = code_of(self.function)

    def find_state(self) -> None:
        """Before the first step: find what it reads."""
        places = places_read(self.function)
        self.beside = modules_beside(places, self.model)
        self.buffers = {name: Buffers(module) for name, module in {"": self.model, **self.beside}.items()}
        self._marks = {name: _mark(module) for name, module in self.beside.items()}
        self._own = own_generators(places, self.model)
        self._variables = Variables(places, self.model)

    def begin(self, batch: Any, is_copied: bool) -> Called:
        """A call of the step that begins now. is_copied: see `called`."""
        generators = state_of_process()
        generators["own"] = states_of(self._own)
        return called(batch, is_copied, generators, self._variables.values())

    def is_saved(self, place: str) -> bool:
        """Whether a capsule has the parameters of another module: unless it is large, and the same as at the begin."""
        parameters = list(self.beside[place].parameters())
        is_large = sum(p.nbytes for p in parameters) > LARGE
        is_trained = any(p.requires_grad for p in parameters)
        return not is_large or is_trained or _mark(self.beside[place]) != self._marks[place]

    def scale(self, number: int) -> torch.Tensor | None:
        """The loss scale of an optimizer's scaler; None without one."""
        scales = [one._scale for one in self.scalers if getattr(one, "_scale", None) is not None]
        if not scales:
            return None
        return scales[number] if len(scales) == len(self.optimizers) else scales[0]


@torch.no_grad()
def _mark(module: nn.Module) -> list[float]:
    """An entry of each parameter, by which a module is known to have changed, also through `.data`."""
    marks: list[float] = []
    for p in map(local, module.parameters()):
        if not has_no_entries(p):
            marks.append(float(p.detach().flatten()[p.numel() // 2].abs()))
    return marks


def modules_beside(places: Sequence[Place], model: nn.Module) -> dict[str, nn.Module]:
    """{variable: module} of the modules with a state that a step reads, and that are no part of the model."""
    known = set(map(id, model.modules()))
    found: dict[str, nn.Module] = {}
    for name, value in (pair for place in places for pair in _modules_at(place)):
        module = bare(value)
        is_new = id(module) not in known and not _contains(module, model)
        if is_new and (any(True for _ in module.parameters()) or any(True for _ in module.buffers())):
            found[name] = module
            known.update(map(id, module.modules()))
    return found


def _modules_at(place: Place) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of a variable that is a module, or a dict or list of modules."""
    value = place.get()
    items: Any = ()
    if isinstance(value, nn.Module):
        yield place.name, value
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        if isinstance(item, nn.Module):
            yield f"{place.name}[{key!r}]", item


def _contains(module: nn.Module, model: nn.Module) -> bool:
    """Whether the model is a part of a module, such as of a wrapper that computes the loss."""
    parts = set(map(id, module.modules()))
    members = model if isinstance(model, Several) else [model]
    return any(id(one) in parts for one in members)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def other_parameters(watched: Watched) -> Mapping[str, torch.Tensor]:
    """{optimizer.parameter: value} of parameters that no module contains, by their numbers."""
    known = {id(p) for module in (watched.model, *watched.beside.values()) for p in module.parameters()}
    found: dict[str, torch.Tensor] = {}
    for number, optimizer in enumerate(watched.optimizers):
        for i, p in enumerate(parameters_of(optimizer)):
            if id(p) not in known:
                found[f"{number}.{i}"] = p
    return found


def code_of(function: Any) -> Code | None:
    """Where a function is written; None for one without a file."""
    try:
        file = inspect.getsourcefile(function) or ""
        text = Path(file).read_bytes()
        return Code(str(Path(file).resolve()), function.__qualname__, function.__code__.co_firstlineno, digest(text))
    except (OSError, TypeError, AttributeError):
        return None


def digest(text: bytes) -> str:
    """The SHA-256 of a file's text."""
    return hashlib.sha256(text).hexdigest()


def _is_sharded(p: Any) -> bool:
    return callable(getattr(p, "to_local", None))
