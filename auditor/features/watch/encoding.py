"""Batches as data that loads with `weights_only=True`: tensors, numbers, texts, lists and dicts. Other values become a dict
with the key `_KIND`."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

_KIND = "__auditor__"
_PLAIN = (bool, int, float, str, bytes, complex, type(None))
DEEP = 40
"""Largest depth of a batch: objects that refer to each other have no end."""


@dataclass(frozen=True)
class NotSaved:
    """Stands for a value of a batch that a capsule cannot contain."""

    text: str


# The tensors of a batch.


def members_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object that holds tensors, such as a batch of graphs; None for another object, or for one
    of a training: a loader, a dataset, an optimizer."""
    members = getattr(value, "__dict__", None)
    is_training = isinstance(value, torch.optim.Optimizer | DataLoader | Dataset) or hasattr(value, "__next__")
    if is_training or callable(value) or not isinstance(members, dict):
        return None
    return members if any(isinstance(x, torch.Tensor | Mapping | list) for x in members.values()) else None


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, also in the attributes of the user's own objects."""
    return list(_tensors_in(batch, set(), 0))


def _tensors_in(tree: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif type(leaf) not in _PLAIN and id(leaf) not in seen and depth < DEEP:
            members = members_of(leaf)
            seen.add(id(leaf))
            if members is not None:
                yield from _tensors_in(members, seen, depth + 1)


def over_batch(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The batch with `function` of each tensor, in new containers and objects."""
    return _over(function, batch, {})


def _over(function: Callable[[torch.Tensor], torch.Tensor], tree: Any, done: dict[int, Any]) -> Any:
    """See `over_batch`. done: {id of an object: its copy}, since objects may refer to each other."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if type(leaf) in _PLAIN:
            return leaf
        if id(leaf) in done:
            return done[id(leaf)]
        members = members_of(leaf)
        if members is None:
            return leaf
        again = copy.copy(leaf)
        done[id(leaf)] = again
        vars(again).update(_over(function, dict(members), done))
        return again

    return pytree.tree_map(of_leaf, tree)


# To data, and back.


def encode(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Convert a batch, or another value, to one that `torch.load(weights_only=True)` accepts; tensors go to the CPU.

    What cannot be converted becomes a `NotSaved`, see `decode`. outer: ids of the containers around the value.
    """
    if type(value) in _PLAIN or isinstance(value, torch.dtype):
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value)
    if id(value) in outer or len(outer) > DEEP:
        return _not_saved(value)
    inside = _encoder((*outer, id(value)))
    if type(value) is list:
        return [inside(item) for item in value]
    if type(value) is tuple:
        return {_KIND: "tuple", "items": [inside(item) for item in value]}
    if isinstance(value, tuple):
        return {_KIND: "named", **_type_of(value), "items": [inside(item) for item in value]}
    if isinstance(value, Mapping):
        pairs = [[inside(key), inside(item)] for key, item in value.items()]
        return {_KIND: "mapping", **_type_of(value), "pairs": pairs}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return _encode_numpy(value, inside)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [[one.name, inside(getattr(value, one.name, None))] for one in dataclasses.fields(value)]
        return {_KIND: "dataclass", **_type_of(value), "pairs": pairs}
    if isinstance(value, torch.device):
        return {_KIND: "device", "text": str(value)}
    if isinstance(value, set | frozenset):
        return {_KIND: "set", "items": [inside(item) for item in value]}
    if isinstance(value, int | float | str):  # subclasses, such as enums
        return next(base(value) for base in (int, float, str) if isinstance(value, base))
    members = members_of(value)
    if members is not None:
        pairs = [[name, inside(item)] for name, item in members.items()]
        return {_KIND: "object", **_type_of(value), "pairs": pairs}
    return _not_saved(value)


def _encoder(outer: tuple[int, ...]) -> Callable[[Any], Any]:
    """`encode` for the items of a container."""
    return lambda item: encode(item, outer)


def _type_of(value: Any) -> dict[str, str]:
    return {"module": type(value).__module__, "name": type(value).__qualname__}


def _not_saved(value: Any) -> dict[str, str]:
    try:
        text = repr(value)[:200] if not isinstance(value, torch.Tensor) else f"a tensor of {type(value).__name__}"
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return {_KIND: "unknown", **_type_of(value), "text": text}


def _encode_numpy(value: Any, inside: Callable[[Any], Any]) -> Any:
    try:
        return {_KIND: "numpy", "array": torch.from_numpy(value.copy()), "scalar": False}
    except (TypeError, AttributeError):  # a scalar, texts, objects
        return inside(value.item() if getattr(value, "ndim", 1) == 0 else value.tolist())


def _encode_tensor(x: torch.Tensor) -> Any:
    """A copy on the CPU as a plain tensor: of a sharded one this rank's part, and never a view of a larger storage."""
    try:
        part = local(x).detach()
        if type(part) is not torch.Tensor and part.layout is torch.strided:
            part = part.as_subclass(torch.Tensor)
        host = part.cpu()
        is_shared = (
            host.layout is torch.strided and host.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        )
        is_view = host.layout is torch.strided and host.untyped_storage().nbytes() > host.nbytes
        return host.clone() if is_shared or is_view else host
    except (RuntimeError, NotImplementedError, TypeError):  # a subclass without entries of its own
        return _not_saved(x)


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, without communication; another tensor as it is."""
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return x
    to_local = getattr(x, "to_local", None)
    return to_local() if callable(to_local) else x


def decode(value: Any, script: str = "") -> Any:
    """The inverse of `encode`. Types of the user become themselves if their modules are imported, else dicts and tuples;
    a value that was not saved becomes a `NotSaved`. script: name of the file that was `__main__` in the training."""

    def inside(item: Any) -> Any:
        return decode(item, script)

    if isinstance(value, list):
        return [inside(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case "tuple":
            return tuple(map(inside, value["items"]))
        case "set":
            return set(map(inside, value["items"]))
        case "named":
            items = [inside(item) for item in value["items"]]
            return _made(value, script, lambda kind: _named(kind, items), tuple(items))
        case "mapping":
            pairs = {inside(key): inside(item) for key, item in value["pairs"]}
            return _made(value, script, lambda kind: _mapping(kind, pairs), pairs)
        case "dataclass" | "object":
            members = {name: inside(item) for name, item in value["pairs"]}
            return _made(value, script, lambda kind: _with_members(kind, members), members)
        case "numpy":
            return value["array"].numpy()
        case "device":
            return torch.device("cpu")
        case "unknown":
            return NotSaved(value["text"])
    return value


def _made(value: Mapping[str, Any], script: str, make: Callable[[Any], Any], otherwise: Any) -> Any:
    """An object of the type that a value was encoded from, if the user's code has imported it."""
    for module in _modules(value["module"], script):
        kind: Any = module
        for name in value["name"].split("."):
            kind = getattr(kind, name, None)
        if isinstance(kind, type):
            try:
                return make(kind)
            except Exception:
                return otherwise
    return otherwise


def _modules(name: str, script: str) -> list[Any]:
    """The modules in which a type may be defined: a script that ran as `__main__` has another name when it is imported."""
    if name != "__main__":
        return [sys.modules.get(name)]
    files = [(one, getattr(one, "__file__", None)) for one in list(sys.modules.values())]
    return [one for one, file in files if file and script and Path(file).name == script]


def _named(kind: type[Any], items: list[Any]) -> Any:
    """A named tuple, or another subclass of tuple, such as `torch.Size`."""
    if not issubclass(kind, tuple):
        return tuple(items)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _mapping(kind: Any, pairs: Mapping[Any, Any]) -> Any:
    return kind(pairs) if issubclass(kind, Mapping) else pairs


def _with_members(kind: type[Any], members: Mapping[str, Any]) -> Any:
    made = object.__new__(kind)
    for name, item in members.items():
        object.__setattr__(made, name, item)
    return made
