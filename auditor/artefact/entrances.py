"""Makes a plan hold wherever a model is entered: at any module, or at a public method of a module.

`patched_model.py` contains a copy of this code from `DTYPE_METHODS` on.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..isolation.members import WRAPPERS, named_parameters, named_tensors
from .runtime import MOVABLE, call, convert, inside

DTYPE_METHODS = ("to", "half", "float", "double", "bfloat16", "type")
"""Methods of nn.Module that convert weights to a dtype."""

WRAPPER_NAMES = ("run_scope", "run_entrance", "run_method", "convert_weights", "replicate_bound")
"""Functions that a plan binds to attributes of modules; their second argument is the attribute's earlier value."""

DECORATED = (functools.partialmethod, functools.singledispatchmethod)
"""Methods of a class that are no callables themselves; their attribute `func` is one."""

UNBOUND = (type, staticmethod, classmethod, functools._lru_cache_wrapper, nn.Module)
"""Callables that are no methods; and methods with a cache, whose attributes no replacement would have."""


class PlanCalls:
    """Tells, for each thread, whether a call of the patched model is in progress. One object for each applied plan.

    title: the plan in messages. dtypes: {name of a parameter or buffer: its dtype under the plan}. A copied or pickled
    model has no call in progress.
    """

    def __init__(self, title: str, dtypes: dict[str, torch.dtype]) -> None:
        self.title, self.dtypes = title, dtypes
        self.threads = threading.local()
        # torch.compile would compile again once the first call creates the attributes
        self.threads.busy = False
        self.threads.in_method = False
        self.has_warned = False
        self.has_named_weights = False

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanCalls, (self.title, self.dtypes)

    def is_outermost(self) -> bool:
        """Whether a call that begins now is the outermost one.

        False in a backward pass: a checkpoint then repeats a part of a forward call, with the flags of that call.
        """
        if getattr(self.threads, "busy", False):
            return False
        return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `function` as the outermost call of this thread."""
        self.threads.busy = True
        try:
            return function(*args, **kwargs)
        finally:
            self.threads.busy = False

    def is_in_method(self) -> bool:
        """Whether a method of the model, and not yet a forward, is in progress: its calls were not recorded."""
        return getattr(self.threads, "in_method", False)

    def run_in(self, is_method: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `function`, a method of the model or what a forward does."""
        before = self.is_in_method()
        self.threads.in_method = is_method
        try:
            return function(*args, **kwargs)
        finally:
            self.threads.in_method = before


def run_planned(module: nn.Module, inner: Any, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module, or its method `inner`, in the precision of its scope and with the scope's kept functions."""
    if how["precision"] is None:
        return call(module, inner, args, kwargs)
    if how["raises"]:
        args, kwargs = convert((args, kwargs), torch.float32)
    if how["keep"] or how["region"] is not None:
        inner = functools.partial(inside, module, inner, how)
    return how["runtime"].run(module, inner, how["precision"], how["output"], args, kwargs)


def run_outermost(module: nn.Module, inner: Any, how: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """Run an outermost call as if the enclosing modules had made it. Raises: the exceptions of the model."""
    around = how["around"]
    if around["raises"]:
        args, kwargs = convert((args, kwargs), torch.float32)
    run = functools.partial(run_planned, module, inner, how)
    if around["keep"] or around["region"] is not None:
        run = functools.partial(inside, module, run, around)
    if torch.compiler.is_compiling():
        return how["calls"].run(run, args, kwargs)
    try:
        return how["calls"].run(run, args, kwargs)
    except RuntimeError as error:
        if (changed := changed_weights(module, how)) is not None:
            error.add_note(changed)
        raise


def run_scope(module: nn.Module, inner: Any, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a wrapped module, bound by functools.partial: a partial can be pickled, copied, exported and
    compiled."""
    if not how["calls"].is_outermost():
        if not how["calls"].is_in_method():
            return run_planned(module, inner, how, *args, **kwargs)
        run = functools.partial(run_planned, module, inner, how)
        return how["calls"].run_in(False, run, args, kwargs)
    warn_outside(module, how)
    return run_outermost(module, inner, how, args, kwargs)


def run_entrance(module: nn.Module, inner: Any, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a module that has the precision of its parent: only an outermost call enters the precision.

    inner: None, since a forward of the instance's own is not replaced."""
    if getattr(how["calls"].threads, "busy", False):  # the usual case: no further Python calls
        return type(module).forward(module, *args, **kwargs)
    if not how["calls"].is_outermost():
        return call(module, inner, args, kwargs)
    warn_outside(module, how)
    return run_outermost(module, inner, how, args, kwargs)


def run_method(module: nn.Module, inner: Any, name: str, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """A public method of a module: an outermost call runs in the precision of the module, and so does a call by
    another such method, whose own tensors may be FP32.

    A generator that the method returns computes in this precision whenever it is resumed.
    """
    if inner is None:
        inner = inspect.getattr_static(type(module), name).__get__(module, type(module))
    function = inner
    calls = how["calls"]
    if not calls.is_outermost():
        if not calls.is_in_method():
            return function(*args, **kwargs)
        (nested,) = run_planned(module, functools.partial(boxed, function), how, *args, **kwargs)
        return nested
    run = functools.partial(calls.run_in, True, functools.partial(boxed, function))
    (result,) = run_outermost(module, functools.partial(call_with, run), how, args, kwargs)
    warn_added(module, name, how)
    return resumed(module, how, result) if isinstance(result, types.GeneratorType) else result


def call_with(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `run` with the arguments as a tuple and a dict."""
    return run(args, kwargs)


def boxed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any]:
    """The result in a tuple, so that a generator is not read at once."""
    return (function(*args, **kwargs),)


def resumed(module: nn.Module, how: dict[str, Any], generator: Any) -> Iterator[Any]:
    """Run a generator; every step is an outermost call of its own."""
    sent = None
    try:
        while True:
            run = functools.partial(how["calls"].run_in, True, functools.partial(step, generator, sent))
            (item,) = run_outermost(module, functools.partial(call_with, run), how, (), {})
            if isinstance(item, StopIteration):
                return item.value
            sent = yield item
    finally:
        generator.close()


def step(generator: Any, sent: Any) -> tuple[Any]:
    """The generator's next item; StopIteration as an item at its end."""
    try:
        return (generator.send(sent),)
    except StopIteration as end:
        return (end,)


def convert_weights(module: nn.Module, inner: Any, calls: PlanCalls, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """The `_apply` of a module under a plan: weights move to other devices, but keep the dtypes of the plan.

    A call that would change dtypes, such as `model.half()`, gets one warning, which names the call.
    """
    own = functools.partial(type(module)._apply, module) if inner is None else inner
    if isinstance(fn, functools.partial) and fn.func is without_dtype:  # called by the `_apply` of a parent
        return own(fn, *args, **kwargs)
    refused: list[torch.dtype] = []
    result = own(functools.partial(without_dtype, refused, fn), *args, **kwargs)
    if refused:
        method, place = conversion_call()
        conversion = f"to({refused[0]})" if method in ("to", "type", "") else f"{method}()"
        warnings.warn(
            f".{conversion}{place} does not change the model's dtypes, which the {calls.title} sets. "
            "For other dtypes, apply another plan, or build the model again.",
            stacklevel=caller_level(),
        )
    return result


def without_dtype(
    refused: list[torch.dtype], fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """`fn(x)` without a change between floating-point dtypes. refused: gets the dtype of a change that was left out."""
    if type(x) not in (torch.Tensor, nn.Parameter) or x.dtype not in MOVABLE or x.layout is not torch.strided:
        return fn(x)
    like = fn(torch.empty(0, dtype=x.dtype, device=x.device))
    if not like.is_floating_point() or like.dtype is x.dtype:
        return fn(x)
    refused.append(like.dtype)
    return x if like.device == x.device else x.to(like.device)


def conversion_call() -> tuple[str, str]:
    """The name of the method of nn.Module that converts weights at the moment, and its place: ` (train.py:12)`."""
    frame, name = sys._getframe(1), ""
    while frame.f_back is not None and is_internal(frame.f_code):
        name = frame.f_code.co_name if frame.f_code.co_name in DTYPE_METHODS else name
        frame = frame.f_back
    return name, f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def is_internal(code: types.CodeType) -> bool:
    """Whether a function belongs to this file or torch, or is a model's own `to`, which calls that of torch."""
    file = code.co_filename
    return file == __file__ or file.startswith(str(Path(nn.__file__).parents[1])) or code.co_name in DTYPE_METHODS


def caller_level() -> int:
    """The `stacklevel` with which the caller of this function warns about the first line of user code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and is_internal(frame.f_code):
        frame, level = frame.f_back, level + 1
    return level


def warn_outside(module: nn.Module, how: dict[str, Any]) -> None:
    """Warn once that code outside the model calls one of its modules: its other operations are not in the plan."""
    calls, path = how["calls"], how["path"]
    if not path or torch.compiler.is_compiling() or calls.has_warned:
        return
    calls.has_warned = True
    warnings.warn(
        f"{path!r} ({type(module).__name__}) is called from outside the model: it follows the {calls.title}, but the "
        "caller's own operations do not. Call the model or one of its methods, or audit the caller.",
        stacklevel=caller_level(),
    )


def warn_added(module: nn.Module, method: str, how: dict[str, Any]) -> None:
    """Warn once that a method of the model added weights, as methods do that fuse layers or merge adapters."""
    calls = how["calls"]
    if torch.compiler.is_compiling() or calls.has_named_weights or (added := added_weight(module, how)) is None:
        return
    calls.has_named_weights = True
    warnings.warn(
        f".{method}() of {type(module).__name__} added the weight {added!r}, of which the {calls.title} knows nothing: "
        f"call .{method}() first, audit that model, and apply its plan.",
        stacklevel=caller_level(),
    )


def added_weight(module: nn.Module, how: dict[str, Any]) -> str | None:
    """The name of the first parameter that a module got after the plan was applied; None if there is none.

    Wrapping a part of the model, for example by torch.compile, adds none."""
    prefix = f"{how['path']}." if how["path"] else ""
    wrappers = {name for name in WRAPPERS.values() if name.startswith("_")}
    for name, _ in named_parameters(module):
        full = f"{prefix}{name}"
        unwrapped = ".".join(part for part in full.split(".") if part not in wrappers)
        if full not in how["calls"].dtypes and unwrapped not in how["calls"].dtypes:
            return full
    return None


def changed_weights(module: nn.Module, how: dict[str, Any]) -> str | None:
    """In words, the first weight of a module that does not have the dtype of the plan, or that the plan does not know;
    None if there is none."""
    for name, tensor in named_tensors(module):
        full = f"{how['path']}.{name}" if how["path"] else name
        planned = how["calls"].dtypes.get(full, tensor.dtype)
        if tensor.dtype is not planned:
            return (
                f"The weight {full!r} is {tensor.dtype}, and {planned} under the {how['calls'].title}: it was replaced "
                "after the plan was applied. Pass weights of these dtypes, or apply the plan again."
            )
    if (added := added_weight(module, how)) is not None:
        return f"The weight {added!r} was added after the {how['calls'].title} was applied: audit the changed model."
    return None


def entrance_methods(module: nn.Module) -> list[str]:
    """Public methods of a module's class that use its modules or weights, directly or through other methods.

    The bytecode tells which attributes a method reads. Methods of nn.Module, `forward`, and coroutines are left out.
    """
    methods: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        if not issubclass(nn.Module, kind):
            methods |= vars(kind)
    codes = {name: method_codes(value) for name, value in methods.items()}
    read = {name: set().union(*map(attributes_read, each)) for name, each in codes.items()}
    reached: set[str] = set()
    used = {*module._modules, *module._parameters.keys(), *module._buffers}
    while more := {name for name, names in read.items() if names & used} - reached:
        reached |= more
        used |= more
    public = (name for name in methods if name in reached and not name.startswith("_") and not hasattr(nn.Module, name))
    return [name for name in public if not any(code.co_flags & inspect.CO_COROUTINE for code in codes[name])]


def method_codes(value: Any) -> list[types.CodeType]:
    """Code of a method and of the functions inside its decorators; [] for other attributes of a class.

    A decorator has the function that it replaces in a closure, in an attribute, or as `__wrapped__`."""
    is_method = isinstance(value, DECORATED) or (callable(value) and not isinstance(value, UNBOUND))
    if not is_method or not hasattr(type(value), "__get__"):
        return []
    codes: list[types.CodeType] = []
    inside, seen = [value], set[int]()
    while inside:
        each = inside.pop()
        if id(each) in seen or isinstance(each, UNBOUND):
            continue
        seen.add(id(each))
        if isinstance(each, types.FunctionType):
            codes.append(each.__code__)
            inside += [cell.cell_contents for cell in each.__closure__ or () if has_contents(cell)]
        elif not callable(each) and not isinstance(each, DECORATED):
            continue
        inside += getattr(each, "__dict__", {}).values()
        if isinstance(each, functools.partial):  # which has no attributes of Python's
            inside.append(each.func)
    return codes


def has_contents(cell: types.CellType) -> bool:
    """Whether a variable of an enclosing function has a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def attributes_read(code: types.CodeType) -> set[str]:
    """Names of attributes in a function's bytecode, including the functions defined inside."""
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(attributes_read(each) for each in nested))


def bind(module: nn.Module, attribute: str, function: Callable[..., Any], *settings: Any) -> None:
    """Replace an attribute of a module by `function(module, its earlier value, *settings, ...)`, which `unbind` undoes.

    `__dict__` bypasses the module's own `__setattr__`; the function keeps the signature of the replaced method.
    """
    bound = functools.partial(function, module, module.__dict__.get(attribute), *settings)
    module.__dict__[attribute] = functools.update_wrapper(bound, getattr(module, attribute))


def unbind(module: nn.Module) -> None:
    """Restore all attributes of a module that a plan replaced."""
    for attribute, value in list(module.__dict__.items()):
        if is_bound(value):
            del module.__dict__[attribute]
            if value.args[1] is not None:
                module.__dict__[attribute] = value.args[1]


def replicate_bound(module: nn.Module, inner: Any) -> nn.Module:
    """The `_replicate_for_data_parallel` of a module under a plan: the replica's methods run the replica itself."""
    own: Any = type(module)
    replica: nn.Module = own._replicate_for_data_parallel(module) if inner is None else inner()
    for attribute, value in list(replica.__dict__.items()):
        if is_bound(value):
            bound = functools.partial(value.func, replica, *value.args[1:])
            replica.__dict__[attribute] = functools.update_wrapper(bound, value)
    return replica


def is_bound(value: object) -> bool:
    """Whether an attribute of a module is one that a plan replaced."""
    return isinstance(value, functools.partial) and getattr(value.func, "__name__", "") in WRAPPER_NAMES
