"""What the pretend GPU does with an operation: the CPU's kernel, under CUDA's rules of devices, dtypes and arithmetic."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from auditor.isolation.draws import in_float32, may_draw
from auditor.numerics.casting import in_float32 as computed_in_float32
from auditor.numerics.entries import over_tensors, tensors_in
from auditor.numerics.formats import Format, format_of
from auditor.numerics.kernels import CUDA_ARITHMETIC, UnsupportedInFormat, run_op
from tests.pretend_gpu.memory import COUNT, NAME, on_cpu, on_pretend
from tests.support.opinfo import has_half

MAY_MIX = {
    "copy_",
    "_to_copy",
    "_copy_from",
    "_copy_from_and_resize",
    "set_",
    "index",
    "index_put_",
    "_index_put_impl_",
}
"""Operations that CUDA gives tensors of the CPU as well: transfers, and indices."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv"}
CONVOLUTIONS = {"convolution_overrideable", "convolution_backward_overrideable"}

GENERATORS = [torch.Generator() for _ in range(COUNT)]
"""One for each GPU."""

PARTS = {"_cdist_forward": "cdist", "_ctc_loss": "ctc_loss", "_linalg_eigh": "linalg_eigh", "_linalg_svd": "linalg_svd"}
"""Kernels that an operation is made of, which OpInfo has no name for."""

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten


@cache
def half(packet: str, fmt: str) -> bool | None:
    """Whether CUDA takes tensors of the format; None where OpInfo does not say."""
    return has_half(PARTS.get(packet, packet), fmt)


class _Facts(NamedTuple):
    """What an operation's schema says. outs: names of `out=` arguments; written: places of the arguments written to."""

    packet: str
    view: bool
    outs: tuple[str, ...]
    written: tuple[int, ...]
    inplace: bool
    device: bool


@cache
def _facts(op: Any) -> _Facts:
    schema = op._schema
    arguments = schema.arguments
    writes = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    return _Facts(
        packet=schema.name.partition("::")[2],
        view=any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns),
        outs=tuple(a.name for a, write in zip(arguments, writes, strict=True) if write and a.kwarg_only),
        written=tuple(i for i, (a, w) in enumerate(zip(arguments, writes, strict=True)) if w and not a.kwarg_only),
        inplace=bool(schema.returns) and all(x.alias_info is not None for x in schema.returns),
        device=any(a.name == "device" for a in arguments),
    )


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation on tensors of one GPU. Raises: RuntimeError, torch.OutOfMemoryError, as CUDA does."""
    facts, tensors = _facts(op), tensors_in((args, kwargs))
    index = _device_of(facts.packet, tensors, kwargs)
    if facts.view or facts.packet == "set_":
        return op.redispatch(_CPU, *args, **kwargs)
    low = next((row for x in tensors if (row := format_of(x.dtype)) is not None and row.low), None)
    if low is not None and half(facts.packet, low.name) is False:
        name = {"fp16": "Half", "bf16": "BFloat16"}[low.name]
        raise RuntimeError(f"\"{facts.packet}_cuda\" not implemented for '{name}'")
    if facts.packet == "resize_":
        return args[0].set_(on_pretend(torch.empty(args[1], dtype=args[0].dtype), index))
    there, named = over_tensors(lent, args), over_tensors(lent, kwargs)
    if facts.device:
        named = {**named, "device": "cpu"}
    fresh = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in facts.outs if name in kwargs}
    with drawing(op, index):
        result = _computed(op, facts.packet, there, named | fresh, low)
    if fresh:
        given = [_filled(kwargs[name], value, index) for name, value in fresh.items()]
        return given[0] if len(given) == 1 else tuple(given)
    if facts.packet == "_copy_from":
        return args[1]
    if facts.inplace:
        written = [args[place] for place in facts.written]
        return written[0] if len(written) == 1 else tuple(written)
    return over_tensors(lambda x: on_pretend(x, index), result)


def lent(x: torch.Tensor) -> torch.Tensor:
    """The memory of one of the GPUs, as a tensor of the CPU; a tensor of the CPU itself."""
    return on_cpu(x) if x.device.type == NAME else x


def _filled(given: torch.Tensor, value: torch.Tensor, index: int) -> torch.Tensor:
    if value.shape != given.shape:
        return given.set_(on_pretend(value, index))
    on_cpu(given).copy_(value)
    return given


def _computed(op: Any, packet: str, args: Any, kwargs: Any, low: Format | None) -> Any:
    if _in_tf32(packet):
        args, kwargs = over_tensors(_truncated, args), over_tensors(_truncated, kwargs)
    if may_draw(op):
        return in_float32(op, args, kwargs)
    if _has_number(op, args):  # which no overload takes in a tensor's place, and the name does
        with CUDA_ARITHMETIC:
            return op.overloadpacket(*args, **kwargs)
    known = KNOWN_AS.get(op, op)
    if not isinstance(known, torch._ops.OpOverload):
        return known(*args, **kwargs)
    try:
        return run_op(known, args, kwargs)
    except UnsupportedInFormat as error:
        if "kernel on CUDA" in str(error) and low is not None and half(packet, low.name):
            return computed_in_float32(known, args, kwargs, low)  # whatever kernels the auditor's tables lack
        if "overflow" not in str(error) and "does not fit" not in str(error):
            raise RuntimeError(str(error)) from None  # the class is the auditor's own; a GPU has torch's
        raise RuntimeError(f"value cannot be converted to type at::Half without overflow ({error})") from None


def _backward_of_convolution(*args: Any) -> Any:
    return run_op(_aten.convolution_backward.default, (*args[:3], None, *args[3:]), {})


def _histogram(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.histc(x if x.is_floating_point() else x.double(), *args, **kwargs).to(x.dtype)


KNOWN_AS = {
    _aten.histc.default: _histogram,
    _aten.convolution_overrideable.default: _aten.convolution.default,
    _aten.convolution_backward_overrideable.default: _backward_of_convolution,
    _aten._copy_from.default: lambda source, target, non_blocking=False: target.copy_(source),
}
"""What torch calls on a device of its kind, and the CPU knows by another name."""


@cache
def _takes_tensors(op: Any) -> tuple[bool, ...]:
    return tuple(isinstance(a.type, torch.TensorType) for a in op._schema.arguments)


def _has_number(op: Any, args: Any) -> bool:
    pairs = zip(_takes_tensors(op), args, strict=False)
    return any(wanted and isinstance(x, int | float | complex) for wanted, x in pairs)


def _in_tf32(packet: str) -> bool:
    if packet in PRODUCTS:
        return torch.backends.cuda.matmul.allow_tf32
    return packet in CONVOLUTIONS and torch.backends.cudnn.allow_tf32


def _truncated(x: torch.Tensor) -> torch.Tensor:
    """FP32 numbers with the ten bits of significand that TF32 keeps."""
    if x.dtype is not torch.float32:
        return x
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _device_of(packet: str, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> int:
    """Number of the GPU. Raises: RuntimeError, where tensors are on several devices."""
    together = {x.device for x in tensors if x.device.type == NAME or x.dim()}
    if len(together) > 1 and packet not in MAY_MIX:
        listed = " and ".join(sorted(map(str, together)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {listed}! ({packet})")
    asked = kwargs.get("device")
    if asked is not None:
        return torch.device(asked).index or 0
    return next((device.index or 0 for device in together if device.type == NAME), 0)


@contextmanager
def drawing(op: Any, index: int) -> Iterator[None]:
    """Random operations draw from the GPU's own generator."""
    if not may_draw(op):
        yield
        return
    kept = torch.get_rng_state()
    torch.set_rng_state(GENERATORS[index].get_state())
    try:
        yield
    finally:
        GENERATORS[index].set_state(torch.get_rng_state())
        torch.set_rng_state(kept)
