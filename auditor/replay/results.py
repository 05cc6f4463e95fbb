"""What the nodes of a run gave, kept on the device, or in the host's memory where the device's is short."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .. import mapped
from ..formats.carried import carried_in
from ..sparing import now
from ..trees import over_tensors, tensors_in

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class _Away:
    """A result whose tensors are on the host. devices: where each of them was."""

    value: Any
    devices: tuple[torch.device, ...]


class OnHost(MutableMapping[K, Any]):
    """Results by node, their tensors in the host's memory; they are handed out on the device that they came from."""

    def __init__(self) -> None:
        self._held: dict[K, Any] = {}

    def __setitem__(self, key: K, value: Any) -> None:
        devices = tuple(x.device for x in tensors_in(value))
        self._held[key] = _Away(over_tensors(on_host, value), devices) if devices else value

    def __getitem__(self, key: K) -> Any:
        value = self._held[key]
        if not isinstance(value, _Away):
            return value
        devices = iter(value.devices)
        return over_tensors(lambda x: x.to(next(devices)), value.value)

    def stay(self, key: K, value: Any) -> None:
        """Keep a result where it is: a weight, which is there in any case."""
        self._held[key] = value

    def __delitem__(self, key: K) -> None:
        del self._held[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def resident() -> bool:
    """Whether results stay in this process's memory, where none is short and none is limited."""
    return not now().host and mapped.now() is None


def results() -> MutableMapping[Any, Any]:
    """An empty mapping for the results of a run; where they are kept is as sparing as the audit is."""
    return OnHost() if now().host else {}


def put(values: MutableMapping[K, Any], key: K, value: Any, *, stays: bool) -> None:
    """Add a result. stays: whether the device holds it in any case."""
    if stays and isinstance(values, OnHost):
        values.stay(key, value)
    else:
        values[key] = value


def on_host(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the host's memory, but for one in a format that torch has no arithmetic in."""
    return x if carried_in(x) is not None else x.detach().cpu()


def waiting(x: torch.Tensor) -> torch.Tensor:
    """The tensor where it may wait until it is read: on its device, or on the host."""
    return on_host(x) if now().host else x


def saving() -> AbstractContextManager[Any]:
    """What autograd saves in the body for a way back waits on the host as well."""
    return torch.autograd.graph.save_on_cpu() if now().host else nullcontext()


def hollow(x: torch.Tensor) -> None:
    """Give back the memory of a tensor that only its place in an autograd graph is needed of: its shape is left."""
    x.data = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
