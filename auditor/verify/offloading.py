"""A patched model whose weights are there for one module at a time: accelerate's hooks load them, and free them after it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import mapped
from ..isolation import isolated
from ..isolation.members import modules_of, named_modules
from ..isolation.tensors import plain_torch
from ..raised import let_through
from ..trees import tensors_in
from .running import Answers, failure_of

Apply = Callable[[nn.Module], object]
Run = Callable[[nn.Module], Answers | str]

OFFLOADED = "offloaded"
"""What is said of answers that were given so."""

PACKAGE = "accelerate"

_CLOSED = (torch.fx.GraphModule, torch.jit.ScriptModule)

_KNOWN = frozenset(
    "__get__ size dim numel stride element_size is_floating_point is_complex is_contiguous __hash__".split()
)
"""Functions of torch that ask for nothing but what a tensor without values has; properties are read by `__get__`."""


def answers_under(model: nn.Module, apply: Apply, run: Run) -> Answers | str:
    """`run(model)` of the model that `apply` patches, or why it cannot be patched; it comes back as it was.

    Where memory is limited, see auditor/mapped, its weights are offloaded.
    """
    if mapped.now() is not None:
        return offloaded(model, apply, run)
    return _as_it_lies(model, apply, run)


def offloaded(model: nn.Module, apply: Apply, run: Run) -> Answers | str:
    """The same with every parameter on no device but while the forward of the module runs that has it.

    What `apply` stores low is rounded as it is loaded, each time. Where that cannot be done, because a weight is read
    outside of the forward of the module that has it or for another reason, the model is run as it lies in memory, and
    `held` of the answers says why.
    """
    reason = unserved(model)
    if reason is None:
        found = _hooked(model, apply, run)
        if isinstance(found, Answers):
            return replace(found, held=OFFLOADED)
        reason = found
    found = _as_it_lies(model, apply, run)
    return replace(found, held=reason) if isinstance(found, Answers) else found


def _as_it_lies(model: nn.Module, apply: Apply, run: Run) -> Answers | str:
    with isolated(model):
        try:
            apply(model)
        except Exception as error:
            let_through(error, memory=False)
            return failure_of(error)
        return run(model)


def _hooked(model: nn.Module, apply: Apply, run: Run) -> Answers | str:
    loaded: set[int] = set()
    absent = _Absent(loaded)
    with isolated(model):
        try:
            values = emptied(model)
            apply(model)
            hook(model, values, loaded)
            with absent, _uncached():
                found = run(model)
        except Exception as error:
            let_through(error, memory=False)
            found = failure_of(error)
        return absent.met or found


def unserved(model: nn.Module) -> str | None:
    """Why the hooks cannot be used on the model at all; None where they can be tried."""
    try:
        importlib.import_module(f"{PACKAGE}.hooks")
    except Exception as error:  # not there, or built for another torch
        let_through(error)
        return f"{PACKAGE} cannot be imported (pip install 'model-precision-auditor[offload]')"
    closed = next((kind for kind in _CLOSED for module in modules_of(model) if isinstance(module, kind)), None)
    return None if closed is None else f"its hooks cannot wrap a {closed.__name__}"


def emptied(model: nn.Module) -> dict[str, torch.Tensor]:
    """Put the model's parameters onto the meta device; their values, by name. Those that were one stay one."""
    twins: dict[int, nn.Parameter] = {}
    values: dict[str, torch.Tensor] = {}
    for path, module in named_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta or type(parameter) is not nn.Parameter:
                continue
            twin = twins.get(id(parameter))
            if twin is None:
                with plain_torch():
                    empty = torch.empty_like(parameter.data, device="meta")
                twin = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                twins[id(parameter)] = twins[id(twin)] = twin
            values[f"{path}.{key}" if path else key] = parameter.data
            module._parameters[key] = twin
    return values


def hook(model: nn.Module, values: Mapping[str, torch.Tensor], loaded: set[int]) -> None:
    """Let every module load its own parameters before its forward, in the dtype that they have, and free them after it.

    loaded: addresses of what is loaded at a time.
    """
    hooks: Any = importlib.import_module(f"{PACKAGE}.hooks")
    for path, module in named_modules(model):
        prefix = f"{path}." if path else ""
        own = {key: values[f"{prefix}{key}"] for key in module._parameters if f"{prefix}{key}" in values}
        if own and not hasattr(module, "_hf_hook"):
            weights = MappingProxyType(own)  # which is no state of the model: what looks after that leaves it alone
            loading = _kind()(execution_device="cpu", offload=True, weights_map=weights)
            loading.addresses = loaded
            hooks.add_hook_to_module(module, loading)


@contextmanager
def _uncached() -> Iterator[None]:
    """Autocast keeps no weight that it lowered until its region ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Absent(TorchFunctionMode):
    """Refuses functions of torch that are given what is not there, or write to what is there for a moment.

    Shapes and dtypes are there; a device that is asked for is told, and what is then sent to it is not there either.
    met: the first that was refused, whatever the model made of that. loaded: addresses of what is there for a moment.
    """

    def __init__(self, loaded: set[int]) -> None:
        super().__init__()
        self.met: str | None = None
        self._loaded = loaded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        if name not in _KNOWN:
            given = tensors_in((args, kwargs))
            if any(x.is_meta for x in given):
                self._refuse(f"a weight is read outside of the forward of the module that has it, by {name}")
            if _writes(name) and given and _address(given[0]) in self._loaded:
                self._refuse(f"a forward writes to a weight, by {name}")
        return func(*args, **kwargs)

    def _refuse(self, reason: str) -> None:
        self.met = self.met or reason
        raise RuntimeError(reason)


def _writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument, as torch names them."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and not x.is_nested else 0


@cache
def _kind() -> Any:
    """Accelerate's hook, seen by nobody who watches operations, and inputs and outputs left as they are."""
    hooks: Any = importlib.import_module(f"{PACKAGE}.hooks")

    class Loading(hooks.AlignDevicesHook):  # type: ignore[misc]
        addresses: set[int]

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            with plain_torch():
                super().pre_forward(module)
                self.addresses.update(_address(x) for x in _present(module))
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            with plain_torch():
                loaded = _present(module)
                self.addresses.difference_update(_address(x) for x in loaded)
                super().post_forward(module, None)
                for parameter in loaded:  # a graph of autograd may still hold it
                    parameter.data = torch.empty(0, dtype=parameter.dtype)
            return output

    return Loading


def _present(module: nn.Module) -> list[nn.Parameter]:
    return [x for x in module._parameters.values() if x is not None and not x.is_meta]
