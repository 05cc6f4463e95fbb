"""What values hold, as a digest: equal only where nothing computed from them can differ."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import fx

from ..formats.entries import entries, extent, is_plain, places
from ..ops.nodes import is_torchs_own, op_name

PACKAGE = __name__.partition(".")[0]
_TAKEN = ("_operator", "operator", "builtins", "math", PACKAGE)
"""Where functions come from that change with the versions of Python and of this package alone."""
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme)


class Uncomparable(Exception):
    """Something of which nobody can tell whether it is what it was; the text says what."""


class Contents:
    """Digests of values. The bytes of a tensor are read once for as long as this lives: nothing may write to it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, bytes]] = {}

    def digest(self, *values: Any) -> str:
        """Of all of them, in order. Raises: Uncomparable."""
        found = hashlib.sha256()
        try:
            self._feed(found.update, list(values))
        except RecursionError as error:
            raise Uncomparable("values that hold themselves, or lie too deep") from error
        return found.hexdigest()

    def tensors(self, values: Iterable[Any]) -> str:
        """Of what a graph takes: with the strides of tensors, and which of them lie in the same memory."""
        found, memory = hashlib.sha256(), dict[int, int]()
        for value in values:
            self._feed(found.update, value)
            if isinstance(value, torch.Tensor) and is_plain(value) and value.layout is torch.strided:
                lies = memory.setdefault(value.untyped_storage().data_ptr(), len(memory))
                shared = lies, value.storage_offset(), value.requires_grad
                self._feed(found.update, shared)
        return found.hexdigest()

    def graph(self, module: fx.GraphModule) -> str:
        """Of every operation with its arguments, and of the tensors that the module holds."""
        found = hashlib.sha256()
        for node in module.graph.nodes:
            target = self._attribute(module, node.target) if node.op == "get_attr" else node.target
            written = node.op, node.name, node.meta.get("op"), target, list(node.args), dict(node.kwargs)
            self._feed(found.update, [*written, _outline(node.meta.get("val"))])
        return found.hexdigest()

    @staticmethod
    def _attribute(module: fx.GraphModule, path: Any) -> Any:
        found: Any = module
        for step in str(path).split("."):
            found = getattr(found, step)
        return found

    def _feed(self, update: Callable[[bytes], object], value: Any) -> None:
        """Tag, length and content of each part, so that no two different values give the same bytes."""
        for kind, feed in _KINDS:
            if isinstance(value, kind):
                parts = feed(self, value)
                update(f"{kind.__name__}:{len(parts)}(".encode())
                for part in parts:
                    if isinstance(part, bytes):
                        update(f"{len(part)}:".encode() + part)
                    else:
                        self._feed(update, part[0])
                update(b")")
                return
        raise Uncomparable(f"a value of the type {type(value).__module__}.{type(value).__qualname__}")

    def tensor(self, x: torch.Tensor) -> list[Any]:
        """What tells one tensor from another: its kind, and its bytes."""
        if x.device.type == "meta":
            return [str((x.dtype, tuple(x.shape))).encode()]
        known = self._known.get(id(x))
        if known is None:
            known = self._known[id(x)] = (x, _bytes_of(x))
        return [known[1]]


def _bytes_of(x: torch.Tensor) -> bytes:
    if x.is_quantized:
        raise Uncomparable("a quantised tensor")
    try:
        parts = [entries(x.detach()), *places(x.detach())]
        strides = tuple(x.stride()) if is_plain(x) and x.layout is torch.strided else ()
    except Exception as error:
        raise Uncomparable(f"a tensor of the type {type(x).__name__} ({x.layout})") from error
    found = hashlib.sha256()
    kind = type(x).__qualname__, x.dtype, x.device.type, x.layout, extent(x), strides, x.is_conj(), x.is_neg()
    found.update(str(kind).encode())
    for part in parts:
        flat = part.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8)
        found.update(flat.numpy().data)
    return found.digest()


def _outline(value: Any) -> Any:
    """Shapes and dtypes of what an operation gave, strides too."""
    if isinstance(value, torch.Tensor):
        strides = tuple(value.stride()) if value.layout is torch.strided else ()
        return str(value.dtype), tuple(value.shape), strides
    if isinstance(value, (tuple, list)):
        return [_outline(item) for item in value]
    return str(type(value)) if value is not None else None


def _operation(contents: Contents, op: Any) -> list[Any]:
    if not is_torchs_own(op):
        raise Uncomparable(f"{op_name(op)}, an operation of another library, whose code is not known")
    return [str(op).encode()]


def _function(contents: Contents, function: Any) -> list[Any]:
    module = str(getattr(function, "__module__", None))
    if module.partition(".")[0] not in _TAKEN:
        raise Uncomparable(f"the function {module}.{getattr(function, '__qualname__', function)}")
    return [module.encode(), str(function.__qualname__).encode()]


def _mapping(contents: Contents, value: Mapping[Any, Any]) -> list[Any]:
    return [(part,) for pair in value.items() for part in pair]


def _record(contents: Contents, value: Any) -> list[Any]:
    """A dataclass, or an object of this package: its class, and all that it holds."""
    kind = type(value)
    if dataclasses.is_dataclass(value):
        held: Mapping[str, Any] = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif kind.__module__.partition(".")[0] == PACKAGE:
        held = vars(value)
    else:
        raise Uncomparable(f"a value of the type {kind.__module__}.{kind.__qualname__}")
    return [f"{kind.__module__}.{kind.__qualname__}".encode(), (dict(held),)]


def _text(contents: Contents, value: Any) -> list[Any]:
    return [repr(value).encode()]


_KINDS: tuple[tuple[type[Any], Callable[[Contents, Any], list[Any]]], ...] = (
    (torch.Tensor, Contents.tensor),
    (fx.Node, lambda contents, node: [node.name.encode()]),
    (fx.GraphModule, lambda contents, module: [contents.graph(module).encode()]),
    (torch._ops.OpOverload, _operation),
    (enum.Enum, lambda contents, value: [f"{type(value).__qualname__}.{value.name}".encode()]),
    (type(None), _text),
    (bool, _text),
    (int, lambda contents, value: [hex(value).encode()]),
    (float, _text),
    (complex, _text),
    (str, lambda contents, value: [value.encode("utf-8", "surrogatepass")]),
    (bytes, lambda contents, value: [value]),
    *((kind, _text) for kind in _NAMED),
    (type(...), _text),
    (slice, lambda contents, value: [(value.start,), (value.stop,), (value.step,)]),
    (range, _text),
    (numpy.generic, lambda contents, value: [str(value.dtype).encode(), value.tobytes()]),
    (list, lambda contents, value: [(part,) for part in value]),
    (tuple, lambda contents, value: [(part,) for part in value]),
    (dict, _mapping),
    (Mapping, _mapping),
    ((type(len)), _function),
    ((type(_text)), _function),
    (object, _record),
)
"""What each kind of value is told by: bytes, or values that are told in turn, in a tuple of one. The first that fits counts."""
