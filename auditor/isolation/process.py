"""Saves and restores process-wide settings: random generators, torch flags, compilers, environment, directory."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ..numerics.devices import NATIVE, is_gpu
from .tensors import plain_torch

_MATMUL, _DETERMINISTIC = "float32_matmul_precision", "deterministic_algorithms"
_GENERAL = {"fp32_precision": "generic", "cudnn.fp32_precision": "cuda", "mkldnn.fp32_precision": "mkldnn"}
"""{backend-wide precision flag: torch's name of the backend}."""

ON_A_GPU = ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision")
ON_A_CPU = ("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision")

FLAGS = (
    _MATMUL,
    "cuda.matmul.allow_tf32",
    "cudnn.allow_tf32",
    *_GENERAL,
    *ON_A_GPU,
    *ON_A_CPU,
    "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    _DETERMINISTIC,
)
"""Names of torch's precision flags, in the order in which they are set: finer flags override earlier ones. All but the
first and the last are attributes of `torch.backends`."""

_IEEE = {
    _MATMUL: "highest",
    "cudnn.allow_tf32": False,
    **dict.fromkeys((*_GENERAL, *ON_A_GPU, *ON_A_CPU), "ieee"),
    "cudnn.benchmark": False,
}

OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables that override torch's precision flags."""

Flags = Mapping[str, Any]


def reseed(seed: int) -> None:
    """Seed the generators of Python, torch and NumPy."""
    random.seed(seed)
    if torch.accelerator.current_accelerator() is None:  # torch is built for CPUs alone
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats the call stack for each kind of device
    else:
        torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def process_state() -> Callable[[], None]:
    """Save the global random generators and other process-wide settings; the returned function restores them."""
    with plain_torch():
        gpus = [gpu for gpu in map(torch.get_device_module, NATIVE) if gpu.is_initialized()]
        drawn: list[Callable[[], object]] = [
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
            partial(torch.set_rng_state, torch.get_rng_state()),
            *(partial(gpu.set_rng_state_all, gpu.get_rng_state_all()) for gpu in gpus),
        ]
    before = [read() for read, _ in _SETTINGS]

    def back() -> None:
        with plain_torch():
            for restore in drawn:
                restore()
        for (read, put), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                put(value)

    return back


ENOUGH = 3_000
"""Minimum recursion limit during a run: a module call takes three Python calls, and more in a recorded run. The C++
stack is large enough for this limit."""


def flags() -> dict[str, Any]:
    """{name: value} of the flags in FLAGS and of the environment variables in OVERRIDES; without flags that torch
    refuses to report."""
    result = {name: value for name in FLAGS if (value := _flag(name)) is not None}
    return result | {name: os.environ[name] for name in OVERRIDES if name in os.environ}


@contextmanager
def under(wanted: Flags) -> Iterator[None]:
    """In the `with` block, torch's flags are `wanted` (from `flags()`), and the recursion limit is at least ENOUGH."""
    with ExitStack() as stack:
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        stack.callback(_set_flags, flags())
        _set_flags(wanted)
        sys.setrecursionlimit(max(sys.getrecursionlimit(), ENOUGH))
        yield


def ieee() -> AbstractContextManager[None]:
    """In the `with` block, matrix products, convolutions and recurrent layers of FP32 tensors compute in IEEE FP32, not
    TF32 or BF16. cuDNN's autotuning is off too, since its choice of a convolution would vary between runs. Flags are
    restored."""
    return under({name: value for name, value in _IEEE.items() if _flag(name) is not None})


def loose(found: Flags, device: str) -> tuple[str, ...]:
    """Formats that the flags `found` allow in place of FP32 on a device, such as `tf32`; () if FP32 is IEEE FP32."""
    names = ON_A_GPU if is_gpu(device) else ON_A_CPU
    values = dict.fromkeys(found.get(name) for name in names)
    return tuple(value for value in values if value not in (None, "none", "ieee"))


@contextmanager
def disable_fused_path() -> Iterator[None]:
    """In the `with` block, nn.TransformerEncoder and nn.MultiheadAttention use no fused kernels."""
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        yield


@contextmanager
def disable_compilers() -> Iterator[None]:
    """In the `with` block, compiled functions and TorchScript run uncompiled, so that their operations can be recorded.

    On its first run under autocast, TorchScript would write casts to that dtype into its code, and keep them.
    """
    with ExitStack() as stack:
        stack.callback(torch._C._jit_set_autocast_mode, torch._C._jit_set_autocast_mode(False))  # returns the old mode
        stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        if "torch._dynamo" in sys.modules:  # without torch._dynamo nothing is compiled; its import takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def swap_attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    """In the `with` block, the attribute `name` of `holder`, the module or class that defines it, is `value`."""
    with ExitStack() as stack:
        stack.callback(setattr, holder, name, vars(holder)[name])
        setattr(holder, name, value)
        yield


def _flag(name: str) -> Any:
    """The value of a torch flag; None if the flag does not exist, or finer flags made it ambiguous."""
    try:
        if name == _MATMUL:
            return torch.get_float32_matmul_precision()
        if name == _DETERMINISTIC:
            return torch.are_deterministic_algorithms_enabled()
        return attrgetter(name)(torch.backends)
    except (AttributeError, RuntimeError):
        return None


def _set_flags(wanted: Flags) -> None:
    """Set the flags that differ from `wanted`, each after the flags that it depends on.

    Torch's own test utilities freeze the flags; frozen flags change only in an internal context manager of torch.
    """
    opened: Any = getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)
    with opened():
        for name in FLAGS:
            if name in wanted and _flag(name) != wanted[name]:
                _set_flag(name, wanted[name])


def _set_flag(name: str, value: Any) -> None:
    if name == _MATMUL:
        torch.set_float32_matmul_precision(value)
    elif name == _DETERMINISTIC:
        torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())
    elif name in _GENERAL:  # `torch.backends.mkldnn.fp32_precision = ...` sets all backends in torch 2.13
        torch._C._set_fp32_precision_setter(_GENERAL[name], "all", value)
    else:
        holder, _, flag = name.rpartition(".")
        setattr(attrgetter(holder)(torch.backends) if holder else torch.backends, flag, value)


def _set_environment(wanted: dict[str, str]) -> None:
    """Restore the environment variables that differ; torch's compiler, for example, sets one when it is imported."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


def _set_filters(wanted: list[Any]) -> None:
    """Restore the warning filters. Python then repeats warnings, so the caller does this only if the filters differ."""
    warnings.filters[:] = wanted  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (flags, _set_flags),
    *((partial(torch.is_autocast_enabled, on), partial(torch.set_autocast_enabled, on)) for on in ("cpu", "cuda")),
    *((partial(torch.get_autocast_dtype, on), partial(torch.set_autocast_dtype, on)) for on in ("cpu", "cuda")),
    *(
        (getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kernel}_sdp"))
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    ),
    (lambda: dict(os.environ), _set_environment),
    (os.getcwd, os.chdir),
    (lambda: list(sys.path), lambda wanted: sys.path.__setitem__(slice(None), wanted)),
    (lambda: list(warnings.filters), _set_filters),
)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the messages and prints of exporters and quantizers."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
