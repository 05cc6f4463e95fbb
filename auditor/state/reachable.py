"""All that hangs on a model and its inputs, each object with what it held at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..raised import device_is_full
from .attributes import CLASS, HOOKS, Kind, own_classes
from .contents import ATOMS, Content, content, kinds_of
from .functions import held_by_code, is_users
from .iterators import as_it_is, moved_on
from .storages import Role, Storages
from .tensors import TensorState


class Reachable:
    """The objects that `model` and `holders` lead to, what they hold, and the memory of the tensors among them.

    full: what a GPU said that had no memory left to put them back with.
    """

    def __init__(self, model: nn.Module, holders: Iterable[Any]) -> None:
        self.storages = Storages()
        self.full: Exception | None = None
        self._seen: dict[int, Any] = {}
        self._roles: dict[int, Role] = {}
        self._kinds: dict[int, tuple[Kind, ...]] = {}
        self._hooks: set[int] = set()
        self._contents: list[Content] = []
        self._tensors: list[TensorState] = []
        self._iterators: list[tuple[Any, Any]] = []
        self._collect([model, *holders])
        for state in self._tensors:
            state.watch(self.storages, self._roles.get(id(state.tensor), Role.PLAIN))
        self.storages.copy_small()

    def lend_iterators(self) -> None:
        """Have copies of them moved on until `restore`: nothing moves one back."""
        instead = {id(value): kept for value, kept in self._iterators}
        for held in self._contents if instead else ():
            held.lend(instead)

    def restore(self) -> list[str]:
        """Put everything back; the answer says what could not be.

        Tensors before attributes: one that has to change places with its old self leaves its attributes there.
        Gradients after both: torch compares them with the tensor that they belong to.
        """
        steps: list[Callable[[], Iterable[str] | None]] = [state.restore for state in self._tensors]
        steps += [content.restore for content in self._contents]
        steps += [state.restore_gradient for state in self._tensors]
        return [problem for step in [*steps, self.storages.restore] for problem in self._problems(step)]

    def rebound(self) -> bool:
        """Whether something holds other objects than at the start, or a tensor other memory or another gradient."""
        moved = any(state.moved or state.regraded for state in self._tensors)
        moved = moved or any(moved_on(value, kept) for value, kept in self._iterators)
        return moved or any(content.changed for content in self._contents)

    def _collect(self, roots: list[Any]) -> None:
        waiting = roots[::-1]
        while waiting:
            value = waiting.pop()
            if type(value) not in ATOMS and id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting += self._open(value)

    def _open(self, value: Any) -> Iterator[Any]:
        if issubclass(type(value), torch.Tensor):
            yield self._open_tensor(value).grad
        elif issubclass(type(value), nn.Module):
            buffers = vars(value).get("_buffers") or {}
            self._roles.update((id(buffer), Role.BUFFER) for _, buffer in buffers.items())
            yield from self._open_classes(type(value))
        elif isinstance(value, type) and is_users(value.__module__):
            yield from self._hold(value, CLASS)
        elif (kept := as_it_is(value)) is not None:
            self._iterators.append((value, kept))
        for owner, kind in held_by_code(value, hook=id(value) in self._hooks):
            yield from self._hold(owner, kind)
        for kind in self._kinds_of(type(value)):
            yield from self._hold(value, kind)

    def _open_classes(self, cls: type) -> Iterator[Any]:
        for owner in own_classes(cls) if id(cls) not in self._kinds else ():
            yield from self._hold(owner, CLASS)

    def _kinds_of(self, cls: type) -> tuple[Kind, ...]:
        """Keyed by id: a metaclass may refuse to hash its classes."""
        if id(cls) not in self._kinds:
            self._kinds[id(cls)] = kinds_of(cls)
        return self._kinds[id(cls)]

    def _hold(self, owner: Any, kind: Kind) -> Iterable[Any]:
        held = content(owner, kind)
        self._contents.append(held)
        if kind is HOOKS:
            self._hooks.update(map(id, held.children))
        return held.children

    def _open_tensor(self, tensor: torch.Tensor) -> TensorState:
        state = TensorState(tensor)
        self._tensors.append(state)
        if issubclass(type(tensor), nn.Parameter):
            self._roles.update({id(tensor): Role.PARAMETER, id(state.grad): Role.PARAMETER})
        return state

    def _problems(self, step: Callable[[], Iterable[str] | None]) -> list[str]:
        """One that can't be put back must not keep the others from it."""
        try:
            return list(step() or ())
        except Exception as error:
            self.full = error if device_is_full(error) else self.full
            return [f"{type(error).__name__}: {error}"]
