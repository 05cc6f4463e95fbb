"""Runs operations with the arithmetic of CUDA's kernels: a kernel computes in float32, and rounds its result once.

The rule holds for kernels below autograd, forwards and backwards. Operations that torch composes of several kernels
unfold, so that their intermediate results are rounded. Exceptions are rows of cuda_kernels.toml.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError

from ..errors import MeasureError, first_line, let_through
from . import cuda_indexing, cuda_resampling  # noqa: F401  they register their exceptions
from .attention import fused_attention
from .casting import carried_in, format_in, in_float32, in_format, widen
from .cells import is_fused_cell, run_cell, run_layer
from .cuda_exceptions import ROUNDINGS, rounded_number
from .cuda_facts import KernelFacts, facts_of, refuses_mixture
from .cuda_roundings import saturated_integers
from .devices import target_type
from .entries import is_plain, over_tensors, tensors_in
from .formats import FORMATS, Format, dtype_name, format_of, is_low
from .nodes import arguments_of, mutates, operation_of, overload_of, wait_for_result
from .operations import Operation
from .scans import transformed_lengths

_LOW = frozenset((torch.float16, torch.bfloat16))
"""The low-precision dtypes in which CUDA's kernels compute."""

_EMULATED = "cpu"
"""The device type on which CUDA's arithmetic is emulated, unless it is the target; on others, operations run
natively."""


class UnsupportedInFormat(MeasureError, RuntimeError):
    """The operation does not support the format; the message is the reason. This class is also a RuntimeError, like
    CUDA's error. owner: path of the module that contains the operation, if known. literal: whether a number in the
    user's code does not fit the format.
    """

    def __init__(self, reason: str, owner: str | None = None, *, literal: bool = False) -> None:
        super().__init__(reason, slug="unsupported-op")
        self.owner, self.literal = owner, literal


def run_op(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `target(*args, **kwargs)` as a GPU does; the result has the dtype that torch gives it.

    On a CPU, the kernels that `target` consists of follow the rule of this module. On a GPU, and on a CPU that is the
    target, everything runs natively.
    In a format without native arithmetic, the operation computes in float32 and its result is rounded.
    Raises: UnsupportedInFormat if CUDA has no half kernel, a constant is out of range, dtypes are mixed that CUDA
    refuses, or the operation raises in half precision.
    """
    tensors = tensors_in((args, kwargs))
    if _uses_carried_format(tensors, args, kwargs):
        if is_tensor_core(target):
            _refuse_different_dtypes(operation_of(target).name, tensors)
        return rounding(target, args, kwargs)
    low = _low_dtype(tensors, args, kwargs)
    differs_on_cuda = low is not None or operation_of(target).cast
    try:
        if differs_on_cuda and not _is_native(tensors, kwargs):
            result = _emulate(target, args, kwargs, low, tensors)
        else:
            result = target(*args, **kwargs)
        return wait_for_result(target, result)
    except (UnsupportedInFormat, _StopRecomputationError):  # the second ends torch's checkpoint early
        raise
    except (Exception, SystemExit) as error:  # a user-defined operation may raise anything
        if low is None:
            raise
        let_through(error)
        raise UnsupportedInFormat(f"{operation_of(target).name}: {first_line(error)[:160]}") from error


def _uses_carried_format(tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call reads, or asks for, a format without native arithmetic, which float32 tensors carry."""
    if any(isinstance(value, Format) for value in (*args, *kwargs.values())):
        return True
    return any(carried_in(x) is not None for x in tensors)


def _is_native(tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether a call runs natively: on the CPU as the target, or on another device, where its tensors are, or where it
    is asked to make one."""
    if target_type() == _EMULATED:
        return True
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != _EMULATED:
        return True
    return any(x.device.type != _EMULATED for x in tensors)


def _emulate(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    low: torch.dtype | None,
    tensors: Sequence[torch.Tensor],
) -> Any:
    """Run an operation on a CPU with CUDA's arithmetic. low: the low-precision dtype among its arguments, if any.
    tensors: those in the arguments."""
    op = overload_of(target)
    facts = facts_of(op)
    are_plain = all(map(is_plain, tensors))
    if facts.view and not (facts.composite and are_plain):  # a view of the argument's own memory
        if low is not None:
            _refuse(op, facts, args, kwargs, low, tensors)
        return target(*args, **kwargs)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    runs_below_autograd = isinstance(target, torch._ops.OpOverload) and not gradients
    if runs_below_autograd and facts.is_simple and are_plain:
        return run_kernel(target, args, kwargs)
    if low is not None:
        _refuse(op, facts, args, kwargs, low, tensors)
        run = _special_arithmetic(target, facts, args, kwargs, are_plain)
        if run is not None:
            return run(target, args, kwargs, low)
    if runs_below_autograd and not facts.composite:
        return run_kernel(target, args, kwargs)
    return _run_composed(target, args, kwargs, low)


def _special_arithmetic(
    target: Callable[..., Any], facts: KernelFacts, args: tuple[Any, ...], kwargs: dict[str, Any], are_plain: bool
) -> Callable[..., Any] | None:
    """The function that computes an operation in low precision as a whole; None if its kernels are emulated one by one.

    The function takes (target, args, kwargs, the low-precision dtype).
    """
    operation = operation_of(target)
    if is_fused_cell(target) or operation.recurrent:
        return _run_recurrent
    if operation.powers_of_two or not are_plain:
        return _run_transform
    if facts.whole and not _is_idle_dropout(operation, args, kwargs):
        return _run_whole
    return None


def _run_composed(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype | None
) -> Any:
    """Run an operation that torch composes of several kernels, each with CUDA's arithmetic."""
    with CUDA_ARITHMETIC:
        result = target(*args, **kwargs)
    if operation_of(target).packet == "linear" and low is not None:
        return result.to(low)  # a bias of another dtype is added to the product in place
    return result


def _run_recurrent(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype) -> Any:
    """Run a recurrent cell or layer, which rounds every step."""
    row = format_of(low)
    assert row is not None
    _WATCH.roundings += 2
    if is_fused_cell(target):
        return run_cell(target, args, kwargs, row)
    return run_layer(target, args, kwargs, row)


def _run_whole(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype) -> Any:
    """Run what is one kernel on CUDA, and composed of several on a CPU: in FP32, rounded once, or as fused attention."""
    given = arguments_of(target, args, kwargs, defaults=True)
    if operation_of(target).packet == "scaled_dot_product_attention" and not given["dropout_p"]:
        _WATCH.roundings += 2
        return fused_attention(given, low)
    _WATCH.roundings += 1
    common = _common_dtype(target, args, kwargs, tensors_in((args, kwargs)))
    row = format_of(common) if common is not None else None
    if row is None or not row.low:
        return target(*widen(args), **widen(kwargs))
    return in_float32(target, args, kwargs, row)


def _run_transform(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype) -> Any:
    """Run a Fourier transform, or an operation on sparse or nested tensors, as one kernel. The CPU's implementations
    would refuse half precision before a kernel is called. What cuFFT rounds between passes is not emulated."""
    if mutates(overload_of(target)):
        return target(*args, **kwargs)
    common = _common_dtype(target, args, kwargs, tensors_in((args, kwargs)))
    result = target(*widen(args), **widen(kwargs))
    _WATCH.roundings += 1
    return over_tensors(lambda x: _rounded(x, common), result)


def _is_idle_dropout(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation is dropout in evaluation mode, which returns its argument."""
    is_training = args[2] if len(args) > 2 else kwargs.get("train")
    return operation.thins and is_training is False


class CudaArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the `with` block, in this thread, kernels on CPU tensors compute as CUDA's do.

    The mode acts below autograd: it sees the kernels of a backward pass, and none of the operations that torch composes.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since True would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_kernel(func, args, kwargs or {})


CUDA_ARITHMETIC = CudaArithmetic()  # type: ignore[no-untyped-call]


class _Watch(threading.local):
    """What this thread's kernels rounded since `run_with_exact` began.

    roundings: number of rounded results; a kernel that rounds more often counts twice. pair: the last kernel's result
    and its float32 values, None outside `run_with_exact`.
    """

    roundings = 0
    pair: tuple[Any, Any] | None = None
    is_on = False

    def begin(self) -> None:
        self.roundings = 0
        self.pair = None
        self.is_on = True

    def end(self) -> None:
        self.pair = None
        self.is_on = False


_WATCH = _Watch()


def run_with_exact(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, int]:
    """(the result of `run_op`; its values before the rounding, in float32; the number of roundings).

    The float32 values are None unless a single kernel rounded the result. Roundings: 0 on a GPU, where they are unknown.
    """
    _WATCH.begin()
    try:
        result = run_op(target, args, kwargs)
        pair = _WATCH.pair
    finally:
        _WATCH.end()
    exact = None
    if pair is not None and _WATCH.roundings == 1:
        rounded, wide = pair
        if rounded is result:  # else other operations followed the kernel
            exact = wide
    return result, exact, _WATCH.roundings


def run_kernel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one kernel below autograd as CUDA computes it; natively where the CPU is the target. Raises:
    UnsupportedInFormat."""
    if target_type() == _EMULATED:
        return op(*args, **kwargs)
    facts = facts_of(op)
    if facts.view:
        return op(*args, **kwargs)
    tensors = tensors_in((args, kwargs))
    low = _low_dtype(tensors, args, kwargs)
    if facts.whole and low is not None:
        return _emulate(op, args, kwargs, low, tensors)
    if facts.parts is not None:
        with CUDA_ARITHMETIC:
            return op._op_dk(facts.parts, *args, **kwargs)
    if facts.cast:
        return saturated_integers(op, args, kwargs)
    if low is None or _is_native(tensors, kwargs):
        return op(*args, **kwargs)
    return _run_low_kernel(op, facts, args, kwargs, low, tensors)


def _run_low_kernel(
    op: Any,
    facts: KernelFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    low: torch.dtype,
    tensors: Sequence[torch.Tensor],
) -> Any:
    """Run a kernel on a CPU that reads or returns a low-precision dtype, by the first rule that fits it."""
    if operation_of(op).product and op._overloadname.startswith("dtype"):
        return _product_in_fp32(op, args, kwargs)
    _refuse(op, facts, args, kwargs, low, tensors)
    if facts.native:
        return op(*args, **kwargs)
    if _moves_entries(facts, tensors, low):
        return on_bits(op, args, kwargs)
    common = _common_dtype(op, args, kwargs, tensors)
    if facts.rounding is not None and common is low:
        return _exceptional(op, facts.rounding, args, kwargs, low)
    return rounded_once(op, facts, args, kwargs, common)


def _moves_entries(facts: KernelFacts, tensors: Sequence[torch.Tensor], low: torch.dtype) -> bool:
    """Whether a kernel only moves entries of one low-precision dtype; indices and masks are not entries."""
    if not (facts.moves or facts.moves_by_index):
        return False
    if facts.moves_by_index:
        tensors = [x for x in tensors if x.is_floating_point()]
    return all(x.dtype is low for x in tensors)


def _product_in_fp32(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product of low-precision factors with an FP32 result (`out_dtype`), of which a CPU has no kernel."""
    _refuse_different_dtypes(operation_of(op).name, tensors_in(args[-3:]))
    positional = [value for value in args if not isinstance(value, torch.dtype)]
    named = {key: value for key, value in kwargs.items() if key != "out_dtype"}
    return op.overloadpacket(*widen(positional), **widen(named))


def on_bits(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel that only moves entries on their bits, as 16-bit integers: no arithmetic can be involved."""
    tensors = tensors_in((args, kwargs))
    dtype = next(x.dtype for x in tensors if is_low(x.dtype))
    bits = {id(x): x.view(torch.int16) for x in tensors if x.dtype is dtype}  # {id of an argument: its bits}
    arguments = {id(bits[id(x)]): x for x in tensors if id(x) in bits}  # {id of the bits: the argument}
    bit_args, bit_kwargs = over_tensors(lambda x: bits.get(id(x), x), (args, kwargs))
    result = op(*bit_args, **bit_kwargs)

    def restored(x: torch.Tensor) -> torch.Tensor:
        if id(x) in arguments:  # an argument that was written in place
            return arguments[id(x)]
        return x.view(dtype) if x.dtype is torch.int16 else x

    return over_tensors(restored, result)


def rounded_once(
    op: Any, facts: KernelFacts, args: tuple[Any, ...], kwargs: dict[str, Any], common: torch.dtype | None
) -> Any:
    """Run a kernel in float32, and round each float32 result once, to the dtype that CUDA gives it.

    Arguments that the kernel writes are computed in float32 too, and rounded when they are stored. common: see
    `_common_dtype`.
    """
    _WATCH.roundings += 1
    wide_args, wide_kwargs = _widened(op, facts, args, kwargs, common)
    result = op(*wide_args, **wide_kwargs)
    if not facts.results and not facts.writes and not facts.writes_arguments:
        rounded = over_tensors(lambda x: _rounded(x, common), result)
        if _WATCH.is_on:
            _WATCH.pair = rounded, result
        return rounded
    if facts.out_equal:
        _refuse_out(op, args, kwargs)
    given = arguments_of(op, args, kwargs)
    wide = arguments_of(op, wide_args, wide_kwargs)
    stored = _store_written(op, facts, given, wide)
    return _rounded_results(facts, given, common, stored, result)


def _rounded_results(
    facts: KernelFacts,
    given: dict[str, Any],
    common: torch.dtype | None,
    stored: dict[int, torch.Tensor],
    result: Any,
) -> Any:
    """Round each result to its dtype. stored: {id of a result that the kernel wrote: the argument that it belongs to}."""
    if result is None:
        return None
    if isinstance(result, torch.Tensor) and stored:
        return stored.get(id(result), result)
    if isinstance(result, torch.Tensor):
        (dtype,) = _dtypes(facts, given, common, 1)
        return _rounded(result, dtype)

    def finish(dtype: torch.dtype | None, x: torch.Tensor) -> torch.Tensor:
        return stored[id(x)] if id(x) in stored else _rounded(x, dtype)

    dtypes = _dtypes(facts, given, common, len(result))
    several = [over_tensors(partial(finish, dtype), part) for part, dtype in zip(result, dtypes, strict=True)]
    return tuple(several) if isinstance(result, tuple) else several


def _dtypes(
    facts: KernelFacts, given: dict[str, Any], common: torch.dtype | None, count: int
) -> list[torch.dtype | None]:
    """The dtype of each result: that of the argument that the table names, float32, or the common dtype."""
    dtypes = list[torch.dtype | None]()
    for name in facts.results[:count]:
        argument = given.get(name)
        if name == "fp32":
            dtypes.append(torch.float32)
        elif isinstance(argument, torch.Tensor):
            dtypes.append(argument.dtype)
        else:
            dtypes.append(common)
    missing = count - len(dtypes)
    return dtypes + [common] * missing


@cache
def _written_names(op: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator writes, by its schema."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes, by its schema."""
    if not mutates(op):
        return []
    given = arguments_of(op, args, kwargs)
    return tensors_in([given.get(name) for name in _written_names(op)])


def _store_written(op: Any, facts: KernelFacts, given: dict[str, Any], wide: dict[str, Any]) -> dict[int, torch.Tensor]:
    """Store the float32 values of the arguments that a kernel wrote; {id of these values: the argument itself}."""
    stored = dict[int, torch.Tensor]()
    for name in (*_written_names(op), *facts.writes):
        targets = tensors_in(given.get(name))
        results = tensors_in(wide.get(name))
        for target, values in zip(targets, results, strict=True):
            if values is not target:
                stored[id(values)] = _store(target, values)
    return stored


def _store(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Store values in the memory of an argument; an `out=` argument gets the shape of the values."""
    if target.shape != values.shape:
        target.resize_(values.shape)
    return target.copy_(values)


def _rounded(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Round a float32 or complex64 result to a low-precision dtype; other tensors are returned unchanged."""
    if dtype not in _LOW:
        return x
    if x.dtype is torch.complex64 and dtype is torch.bfloat16:
        return x  # an FFT of BF16 numbers, which torch 2.14 computes in FP32
    if x.dtype is torch.complex64:
        return torch.view_as_complex(torch.view_as_real(x.resolve_conj()).to(dtype))
    if x.dtype is not torch.float32:
        return x
    if x.is_nested:
        x = x.contiguous()  # torch converts only contiguous nested tensors
    return x.to(dtype)


def _to_fp32(x: torch.Tensor) -> torch.Tensor:
    """A low-precision tensor in float32; other tensors are returned unchanged."""
    if x.dtype in _LOW:
        return x.float()
    return x.to(torch.complex64) if x.dtype is torch.complex32 else x


def _widened(
    op: Any, facts: KernelFacts, args: tuple[Any, ...], kwargs: dict[str, Any], common: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in float32, exactly; what CUDA rounds to the common dtype first is rounded.

    These are FP32 tensors if the call asks for a low-precision dtype, zero-dimensional and integer tensors of operations
    that promote, and numbers of operations whose row says so.
    """
    is_low_result = common in _LOW
    asks_low = any(isinstance(value, torch.dtype) and value in _LOW for value in (*args, *kwargs.values()))
    written = {id(x) for x in _written(op, args, kwargs)} if facts.writes_arguments else set[int]()

    def is_rounded(x: torch.Tensor) -> bool:
        if x.dtype is common or x.dtype is torch.bool or x.is_complex() or id(x) in written:
            return False
        is_loaded = facts.promotes and (not x.dim() or not x.is_floating_point())
        return is_loaded or (asks_low and x.is_floating_point())

    def wide(x: torch.Tensor) -> torch.Tensor:
        if is_low_result and is_rounded(x):
            x = x.to(common)
        return _to_fp32(x)

    args = over_tensors(wide, args)
    kwargs = over_tensors(wide, kwargs)
    if asks_low:
        args, kwargs = _map_arguments(lambda x: torch.float32 if isinstance(x, torch.dtype) else x, args, kwargs)
    if facts.rounded and common is not None and is_low_result:
        args, kwargs = _map_arguments(lambda x: rounded_number(x, common) if _is_number(x) else x, args, kwargs)
    return args, kwargs


def _map_arguments(
    function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `function` to every argument, but not to the items of a list."""
    return tuple(map(function, args)), {key: function(value) for key, value in kwargs.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _common_dtype(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> torch.dtype | None:
    """The dtype of an operation's results: the one that the call asks for, or that of the first tensor, or torch's
    promotion of the floating-point tensors, in which zero-dimensional ones count only if there are no others."""
    asked = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
    if asked is not None:
        return asked
    floats = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    if not floats:
        return None
    if all(x.dtype is floats[0].dtype for x in floats):
        return _real(floats[0].dtype)
    if operation_of(op).dtype_of_first or _is_in_place(op):
        return _real(floats[0].dtype)
    deciding = {x.dtype for x in floats if x.dim()} or {x.dtype for x in floats}
    common = deciding.pop()
    for dtype in deciding:
        common = torch.promote_types(common, dtype)
    return _real(common)


def _is_in_place(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op._schema.name.endswith("_") and mutates(op)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _exceptional(op: Any, rule: str, args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype) -> Any:
    """Run a kernel that rounds otherwise than once, by the function of its row's rule."""
    _WATCH.roundings += 2
    given = {"op": operation_of(op).name, **arguments_of(op, args, kwargs, defaults=True)}
    result = ROUNDINGS[rule](given, low)
    written = _written_names(op)
    if not written:
        return result
    target: torch.Tensor = given[written[0]]
    return _store(target, result)


def _low_dtype(tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The low-precision dtype among the tensors, or that the call asks for; None without one."""
    for x in tensors:
        if x.dtype in _LOW:
            return x.dtype
        if x.dtype is torch.complex32:
            return torch.float16
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype) and value in _LOW:
            return value
    return None


def _refuse(
    op: Any,
    facts: KernelFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    low: torch.dtype,
    tensors: Sequence[torch.Tensor],
) -> None:
    """Raise UnsupportedInFormat if CUDA refuses the call: no kernel, mixed dtypes, or a number out of range."""
    operation = operation_of(op)
    are_mixed = len({_real(x.dtype) for x in tensors if x.is_floating_point() or x.is_complex()}) > 1
    promotes = are_mixed and (operation.promotes or facts.promotes)
    if promotes and _common_dtype(op, args, kwargs, tensors) is torch.float32:
        return
    row = format_of(low)
    assert row is not None
    _refuse_missing_kernel(op, facts, row, args, kwargs)
    if are_mixed and operation.packet == "linear" and (args[0].dim() < 3 or args[0].is_contiguous()):
        _refuse_different_dtypes(operation.name, tensors)
    if facts.restricts_dtypes and (are_mixed or facts.fp32):
        _refuse_mixture(op, facts, args, kwargs)
    if facts.checked:
        _refuse_numbers(operation.name, row, (*args, *kwargs.values()))


def _refuse_missing_kernel(
    op: Any, facts: KernelFacts, row: Format, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse an operation of which CUDA has no kernel in the format, or none for these layouts or lengths."""
    operation = operation_of(op)
    missing = f"{operation.name} has no {row.storage} kernel on CUDA"
    if row.name in operation.refused_on_cuda or (facts.sparse_by_dense and _mixes_layouts((args, kwargs))):
        raise UnsupportedInFormat(missing)
    if operation.powers_of_two and row.name == "fp16":
        for length in transformed_lengths(op, args, kwargs):
            if length & (length - 1):
                raise UnsupportedInFormat(f"{missing} for length {length}, which is not a power of two")


def _mixes_layouts(tree: Any) -> bool:
    """Whether there are sparse and dense matrices."""
    return len({is_plain(x) for x in tensors_in(tree) if x.dim()}) > 1


def _refuse_mixture(op: Any, facts: KernelFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the mixtures of dtypes that the table lists."""
    given = arguments_of(op, args, kwargs)
    formats = {name: _formats_in(value) for name, value in given.items()}
    if refuses_mixture(op, formats):
        _refuse_different_dtypes(operation_of(op).name, tensors_in((args, kwargs)))
    for x in tensors_in([given.get(name) for name in facts.fp32]):
        if x.dtype is not torch.float32:
            raise UnsupportedInFormat(f"{operation_of(op).name} needs float32, not {dtype_name(x.dtype)}")


def _refuse_out(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an `out=` argument of another dtype than the result's."""
    outs = [a.name for a in op._schema.arguments if a.kwarg_only and a.alias_info is not None]
    rest = {key: value for key, value in kwargs.items() if key not in outs}
    common = _common_dtype(op, args, rest, tensors_in((args, rest)))
    for x in tensors_in([kwargs.get(name) for name in outs]):
        if x.is_floating_point() and common is not None and x.dtype is not common:
            raise UnsupportedInFormat(
                f"{operation_of(op).name} has an `out` of {dtype_name(x.dtype)} for a result of {dtype_name(common)}"
            )


def _refuse_numbers(name: str, row: Format, arguments: Sequence[Any]) -> None:
    for value in arguments:
        if isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point():
            value = float(value)
        if _is_number(value) and row.largest < abs(value) < float("inf"):
            raise UnsupportedInFormat(
                f"{name} has the constant {value:g}, outside the range of {row.label} (±{row.largest:g})", literal=True
            )


def _refuse_different_dtypes(name: str, tensors: Sequence[torch.Tensor]) -> None:
    names = set[str]()
    for x in tensors:
        if x.is_floating_point():
            row = carried_in(x)
            names.add(dtype_name(x.dtype) if row is None else row.name)
    if len(names) > 1:
        raise UnsupportedInFormat(f"{name} has inputs of different dtypes, {' and '.join(sorted(names))}")


def is_tensor_core(target: Callable[..., Any]) -> bool:
    """Whether the operation is a matrix product or convolution that runs on tensor cores."""
    return operation_of(target).product and not mutates(overload_of(target))


def is_product(target: Callable[..., Any]) -> bool:
    """Whether the result is linear in each tensor argument, so that errors of the arguments add up."""
    return operation_of(target).linear and not mutates(overload_of(target))


def promoted_format(given: Sequence[tuple[str, bool]]) -> str:
    """The result format of torch's type promotion. given: (format, whether a scalar) of each tensor, at least one.

    Scalars count only if all are scalars. Two different low-precision formats promote to float32.
    """
    deciding = {name for name, is_scalar in given if not is_scalar} or {name for name, _ in given}
    low = {name for name in deciding if FORMATS[name].low}
    if len(low) > 1:
        deciding.add("fp32")
    return max(sorted(deciding), key=lambda name: FORMATS[name].bytes)


def rounding(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `target(*args, **kwargs)` in float32, and round the result to the format that type promotion gives."""
    row = _result(operation_of(target), args, kwargs)
    wide = wait_for_result(target, target(*_wide(args), **_wide(kwargs)))
    if row is None or not row.low:
        return wide
    return over_tensors(lambda x: in_format(x, row) if x.dtype is torch.float32 else x, wide)


def _result(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Format | None:
    """The format of the floating-point results; None if a torch.dtype argument decides, or no tensor is floating."""
    asked = next((value for value in (*args, *kwargs.values()) if isinstance(value, (Format, torch.dtype))), None)
    if asked is not None:
        return asked if isinstance(asked, Format) else None
    formats = _formats_in((args, kwargs))
    if not formats:
        return None
    first, _ = formats[0]
    return FORMATS[first if operation.dtype_of_first else promoted_format(formats)]


def _formats_in(tree: Any) -> list[tuple[str, bool]]:
    """(format, whether a scalar) of every floating-point tensor in a tree of arguments."""
    formats = []
    for x in tensors_in(tree):
        row = format_in(x)
        if row is not None:
            formats.append((row.name, x.dim() == 0))
    return formats


def _wide(tree: Any) -> Any:
    """Convert the arguments to float32; dtype arguments that request a format become float32 too."""
    return pytree.tree_map_only(Format, lambda _: torch.float32, widen(tree))
