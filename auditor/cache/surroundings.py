"""What a measurement depends on beside the model: this package, libraries, the processor, and settings of the process."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from ..formats.table import FORMATS
from .content import Uncomparable

_VARIABLES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "ATEN_",
    "DNNL_",
    "ONEDNN_",
    "TORCH",
    "PYTORCH",
    "CUDA",
    "CUBLAS",
    "NVIDIA_",
    "OPENBLAS",
    "GLIBC_",
    "LD_",
    "DYLD_",
)
"""How names of variables begin that libraries of arithmetic listen to, or what chooses these libraries."""

_REPLACED = ("CPU", "Autograd", "AutogradCPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "Python")
"""Where PyTorch has its own kernels in C++ and none in Python."""


def surroundings(device: str) -> list[Any]:
    """Everything, as plain values. device: where the audit runs."""
    return [_code(), _versions(), _processor(), _device(device), _settings(), _variables(), repr(dict(FORMATS))]


def _code() -> str:
    """Of this package: every file of it that computes or says what is computed."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml")):
        found.update(f"{file.relative_to(root).as_posix()}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _versions() -> list[str]:
    torchs = [torch.__version__, str(torch.version.git_version), torch.__config__.show()]
    return [sys.version, *torchs, numpy.__version__, _c_library()]


def _c_library() -> str:
    """Scalar kernels take exp, log and others from it."""
    try:
        return str(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):  # of another maker: the system's own
        return platform.release()


def _processor() -> list[Any]:
    """Its kind and what it can do: kernels are chosen by that."""
    said = Path("/proc/cpuinfo")
    try:
        lines = said.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), told]


def _device(device: str) -> list[str]:
    """device: several, joined by commas, where a model is spread over them."""
    if torch.device(device.partition(",")[0]).type != "cuda":
        return [device]
    known = [(torch.cuda.get_device_name(one), torch.cuda.get_device_capability(one)) for one in device.split(",")]
    return [device, str(known), str(torch.version.cuda)]


def _settings() -> list[Any]:
    """Flags of the process that change which kernels run, or what they give."""
    kernels = sorted(name for name in torch.library._impls if name.startswith("aten/") and not name.endswith("/Meta"))
    replaced = [name for name in kernels if name.rpartition("/")[2] in _REPLACED]
    if replaced:
        raise Uncomparable(f"a kernel of PyTorch's is replaced by one in Python ({replaced[0]})")
    return [[_asked(name, read) for name, read in _FLAGS], kernels]


def _asked(name: str, read: Callable[[], Any]) -> tuple[str, str]:
    try:
        return name, str(read())
    except (AttributeError, RuntimeError) as error:  # of another version of torch
        return name, type(error).__name__


def _subnormal() -> bool:
    """Whether subnormal numbers are kept: torch can be told to, and does not say whether it was."""
    return bool((torch.full((4,), 1e-40) * 1.0).count_nonzero())


_FLAGS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("threads", torch.get_num_threads),
    ("threads between operations", torch.get_num_interop_threads),
    ("default dtype", torch.get_default_dtype),
    ("default device", torch.get_default_device),
    ("matmul precision", torch.get_float32_matmul_precision),
    ("deterministic", torch.are_deterministic_algorithms_enabled),
    ("deterministic, warning", torch.is_deterministic_algorithms_warn_only_enabled),
    ("autocast states", lambda: [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]),
    ("subnormal", _subnormal),
    ("mkldnn", lambda: torch.backends.mkldnn.enabled),
    ("mkldnn deterministic", lambda: torch.backends.mkldnn.deterministic),
    (
        "mkldnn precision",
        lambda: [torch._C._get_fp32_precision_getter("mkldnn", op) for op in ("all", "matmul", "conv")],
    ),
    ("nnpack", torch._C._get_nnpack_enabled),
    ("matmul TF32", lambda: torch.backends.cuda.matmul.allow_tf32),
    ("matmul FP16 sums", lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
    ("matmul BF16 sums", lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    ("matmul FP16 accumulation", lambda: torch.backends.cuda.matmul.allow_fp16_accumulation),
    ("linear algebra", torch.backends.cuda.preferred_linalg_library),
    ("BLAS", torch.backends.cuda.preferred_blas_library),
    ("cudnn", lambda: torch.backends.cudnn.enabled),
    ("cudnn TF32", lambda: torch.backends.cudnn.allow_tf32),
    ("cudnn benchmark", lambda: torch.backends.cudnn.benchmark),
    ("cudnn deterministic", lambda: torch.backends.cudnn.deterministic),
    ("flash attention", torch.backends.cuda.flash_sdp_enabled),
    ("efficient attention", torch.backends.cuda.mem_efficient_sdp_enabled),
    ("plain attention", torch.backends.cuda.math_sdp_enabled),
    ("cudnn attention", torch.backends.cuda.cudnn_sdp_enabled),
    ("optimised modules", torch.backends.mha.get_fastpath_enabled),
    ("optimised einsum", lambda: (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy)),
)


def _variables() -> list[tuple[str, str]]:
    heard = [name for name in os.environ if name.startswith(_VARIABLES) and not name.endswith("_CACHE_DIR")]
    return sorted((name, os.environ[name]) for name in heard)
