"""Intercepts a model's ATen operations before autograd and autocast handle them, with private functions of torch.

Tested on torch 2.11, the oldest version in pyproject.toml, and 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, reduce
from operator import or_
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, _higher_order_ops, _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _push_mode

from ..errors import MeasureError
from ..isolation.process import disable_compilers, disable_fused_path
from ..numerics.entries import tensors_in
from ..numerics.nodes import operation_of
from .regions import Region, one_stack, region_now

_KEY = torch._C.DispatchKey.PreDispatch
_AUTOCAST_KEYS = map(torch._C._dispatch_key_parse, ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1"))
_AUTOCAST = reduce(or_, map(torch._C.DispatchKeySet, _AUTOCAST_KEYS))
_KEY_BELOW = torch._C.DispatchKey.AutocastIPU  # type: ignore[attr-defined]
"""An autocast key that torch does not use. A kernel registered under this key runs where CUDA's autocast acts: below
functorch, above autograd."""
_BATCHED_GRADIENTS = torch._C._dispatch_key_parse("VmapMode")
"""A dispatch key that is active in `torch.autograd.grad(..., is_grads_batched=True)`, which uses no functorch vmap."""

_RUNNING = threading.Lock()


class Handler:
    """Runs a model's operations in place of torch. This base class does what torch does without autocast."""

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run one operation as the user's code called it, with autocast disabled."""
        return op(*args, **kwargs)

    def cast_arguments(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, possibly cast, of an operation on CUDA's autocast lists, below functorch's transforms.
        `run_leaf_op` then runs the operation."""
        return args, kwargs

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run, on plain tensors, one of the operations into which functorch splits an operation."""
        return op(*args, **kwargs)


@contextmanager
def intercept(
    handler: Handler, depth_of: Callable[[], int] = lambda: 0, around: torch.dtype | None = None
) -> Iterator[None]:
    """In the `with` block, every operation of this thread goes through `handler`. depth_of, around: as in `one_stack`.

    Autocast regions of every device type share one stack; PyTorch's fused transformer path is off, since it bypasses
    modules; compiled functions run eagerly. Raises: MeasureError(slug="emulation-busy") if another `intercept` is
    active, in any thread; MeasureError(slug="emulation-ended") if a tracer such as torch.export ran inside.
    """
    if not _RUNNING.acquire(blocking=False):
        raise MeasureError(
            "another run is being recorded or emulated, and a process can have only one such run at a time: "
            "start this run after the other has ended.",
            slug="emulation-busy",
        )
    with ExitStack() as stack:
        stack.callback(_RUNNING.release)
        for operator in list(_higher_order_ops.values()):
            _register_operator(operator)
        stack.enter_context(one_stack(depth_of, around))
        stack.enter_context(disable_fused_path())
        stack.enter_context(disable_compilers())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(_Whole(handler))
        yield


class _Whole(SchemaCheckMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that sees operations before autograd and autocast; such a mode needs this base class of torch."""

    def __init__(self, handler: Handler) -> None:
        TorchDispatchMode.__init__(self, _KEY)  # type: ignore[no-untyped-call]
        self.handler, self.parts = handler, _Parts(handler)

    def __exit__(self, *exception: Any) -> None:
        taken_off = not _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        if taken_off:
            _push_mode(self)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if taken_off:
            raise MeasureError(
                "a tracer such as torch.export ran inside the model and switched off the recording of operations: "
                "trace the model before or after this run, not during it.",
                slug="emulation-ended",
            )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since True would import the compiler, which takes a second, and inspect every operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation_of(func).unfolds:
            with self:
                return func._op_dk(_kernel_of_parts(func), *args, **kwargs)
        region = region_now()  # before the guards below, inside which autocast looks disabled
        # Without the first guard, RNNs run as Python's decomposition, step by step.
        with torch._C._DisablePythonDispatcher(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if not _is_transformed(tensors_in((args, kwargs))):
                return self.handler.run_op(func, args, kwargs, region)
            with self.parts.of(region), _cast_below(self.parts):
                return func(*args, **kwargs)


@cache
def _kernel_of_parts(op: Any) -> Any:
    """The dispatch key of an operation's composite kernel, which calls other operations."""
    keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return torch._C._dispatch_key_parse(next(key for key in keys if has(op.name(), key)))


class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode below functorch, which sees the operations into which functorch splits an operation."""

    supports_higher_order_operators = True
    _should_skip_dynamo = _Whole._should_skip_dynamo

    def __init__(self, handler: Handler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handler, self.region = handler, Region(False, "")

    def of(self, region: Region) -> _Parts:
        """Set the autocast region of the next operation; returns this mode."""
        self.region = region
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return self.handler.run_leaf_op(func, args, kwargs or {}, self.region)


_below: list[_Parts] = []
"""The `_Parts` modes of the operations that are running under a functorch transform, innermost last."""


@contextmanager
def _cast_below(parts: _Parts) -> Iterator[None]:
    """In the `with` block, operations on CUDA's lists are cast where autocast acts: below functorch, above autograd."""
    if not parts.region.enabled:
        yield
        return
    _register_listeners()
    _below.append(parts)
    try:
        with torch._C._SetExcludeDispatchKeyGuard(_KEY_BELOW, False), torch._C._IncludeDispatchKeyGuard(_KEY_BELOW):
            yield
    finally:
        _below.pop()


@cache
def _register_listeners() -> tuple[torch.library.Library, ...]:
    """Register kernels for operations on the autocast lists of CUDA and CPUs, under a key that only `_cast_below` enables."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    others = torch.library.Library("_", "IMPL", _KEY_BELOW.name)  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    listed = torch._C._dispatch_get_registrations_for_dispatch_key
    for name in sorted({*listed("AutocastCUDA"), *listed("AutocastCPU")}):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(rest, partial(_cast_listed, op), _KEY_BELOW.name)  # type: ignore[no-untyped-call]
    return library, others


def _cast_listed(op: Any, *args: Any, **kwargs: Any) -> Any:
    parts = _below[-1]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY_BELOW)):
        args, kwargs = parts.handler.cast_arguments(op, args, kwargs, parts.region)
        return op(*args, **kwargs)


def _register_operator(operator: HigherOrderOperator) -> None:
    """Make `torch.cond` and similar operators run their bodies under `_Whole`, which sees the operations inside."""
    if _Whole in operator.python_key_table:
        return

    def run(mode: _Whole, *args: Any, **kwargs: Any) -> Any:
        dense = operator.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        body = _BODIES.get(operator.name(), dense)  # type: ignore[no-untyped-call]
        if body is None:
            with mode.parts.of(region_now()):
                return operator(*args, **kwargs)
        with mode:
            return body(*args, **kwargs)

    operator.py_impl(_Whole)(run)


def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, more: Any = ()) -> Any:
    while cond_fn(*carried, *more):
        carried = body_fn(*carried, *more)
    return carried


_BODIES: dict[str, Callable[..., Any]] = {
    "cond": lambda pred, true_fn, false_fn, operands=(): (true_fn if pred else false_fn)(*operands),
    "while_loop": _while_loop,
}
"""Replacements for operators whose own kernels refuse to run while a dispatch mode is active."""


def _is_transformed(tensors: list[torch.Tensor]) -> bool:
    """Whether functorch, forward-mode differentiation or batched gradients transform this operation."""
    inside = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    batched = torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS)
    return inside or batched or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
