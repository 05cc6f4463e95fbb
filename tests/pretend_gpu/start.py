"""Starts a GPU that is none, devices of type `pretend`, in this process, before any backward pass: there torch makes its threads."""

import ctypes
from functools import partial
from typing import Any

import torch
from torch.utils import backend_registration

from tests.pretend_gpu.memory import ALLOCATOR, COUNT, NAME, on_pretend

_kept: list[Any] = []
_current = 0


class _Module:
    """`torch.pretend`, after `torch.cuda`."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return _current

    def get_device_name(self, device: Any = None) -> str:
        return "Pretend GPU"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def manual_seed_all(self, seed: int) -> None:
        for generator in _generators():
            generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        return _generators()[torch.device(device).index or 0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        _generators()[torch.device(device).index or 0].set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in _generators()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(_generators(), states, strict=True):
            generator.set_state(state)

    def synchronize(self, device: Any = None) -> None:
        pass

    def max_memory_allocated(self, device: Any = NAME) -> int:
        return ALLOCATOR.peak[torch.device(device).index or 0]

    def reset_peak_memory_stats(self, device: Any = NAME) -> None:
        ALLOCATOR.peak = list(ALLOCATOR.used)

    def empty_cache(self) -> None:
        ALLOCATOR.cached = [0] * COUNT


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _generators() -> list[torch.Generator]:
    from tests.pretend_gpu.kernels import GENERATORS

    return GENERATORS


def start() -> None:
    """Torch knows devices `pretend:0` and `pretend:1` from here on, and the auditor takes them for GPUs."""
    if _kept:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(), device_guard=_Guard())
    from auditor.numerics import devices
    from tests.pretend_gpu import attention, autocast, kernels, recurrent

    library = torch.library.Library("_", "IMPL", "PrivateUse1")
    library.fallback(kernels.run)
    ours = torch.library.Library("aten", "IMPL")
    for name, op in _with_kernels():
        ours.impl(name, partial(kernels.run, op), "PrivateUse1")
    for name in autocast.RECURRENT:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload)
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            ours.impl(name, partial(recurrent.run, op), key)
    for op in (torch.ops.aten._thnn_fused_gru_cell.default, torch.ops.aten._thnn_fused_lstm_cell.default):
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            ours.impl(op._schema.name.partition("::")[2], partial(recurrent.cell, op), key)
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        ours.impl("scaled_dot_product_attention", attention.run, key)
    _kept.extend([library, ours, *autocast.register()])
    devices.NATIVE.insert(0, NAME)
    _copying()
    _in_one_thread()


def _in_one_thread() -> None:
    """Backward passes: torch has a thread for the first device of this kind alone, and it is slow to enter Python from.

    What a hook raises ends the process there, since torch asks Python for a stream as it leaves: it is raised later.
    """
    original, raised = torch.autograd.graph._engine_run_backward, list[Exception]()

    def run(*args: Any, **kwargs: Any) -> Any:
        raised.clear()
        with torch.autograd.set_multithreading_enabled(False):
            found = original(*args, **kwargs)
        if raised:
            raise raised.pop()
        return found

    def keeping(register: Any) -> Any:
        def instead(tensor: torch.Tensor, hook: Any) -> Any:
            def called(given: torch.Tensor) -> Any:
                try:
                    return None if raised else hook(given)
                except Exception as error:
                    raised.append(error)
                    return None

            return register(tensor, called)

        return instead

    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = run
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(torch.Tensor, name, keeping(getattr(torch.Tensor, name)))


def _with_kernels() -> list[tuple[str, Any]]:
    """Operations that have kernels of their own on a GPU as on a CPU; some of them torch would run by their parts."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has(n, "CPU")]
    names += ["aten::_copy_from", "aten::convolution_overrideable", "aten::convolution_backward_overrideable"]
    found = []
    for name in names:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        found.append((name.removeprefix("aten::"), getattr(getattr(torch.ops.aten, packet), overload or "default")))
    return found


def _copying() -> None:
    """A storage is cloned through the allocator of its device, and there is none in Python."""
    original = torch.UntypedStorage.clone

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != NAME:
            return original(self)
        size = self.nbytes()
        held = (ctypes.c_uint8 * max(size, 1)).from_address(self.data_ptr())
        return on_pretend(torch.frombuffer(held, dtype=torch.uint8)[:size], self.device.index).untyped_storage()

    torch.UntypedStorage.clone = clone
