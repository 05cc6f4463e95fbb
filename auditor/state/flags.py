"""The flags that decide how torch computes FP32 on each device, and which libraries compute it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ..devices import is_native
from .ieee import open_to_changes, set_general

_MATMUL, _DETERMINISTIC = "float32_matmul_precision", "deterministic_algorithms"

FLAGS = (
    _MATMUL,
    "cuda.matmul.allow_tf32",
    "cudnn.allow_tf32",
    "fp32_precision",
    "cudnn.fp32_precision",
    "mkldnn.fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
    "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    _DETERMINISTIC,
)
"""Under `torch.backends` but for the first and the last, in the order they are set: the finer ones overrule those before."""

_GENERAL = {"fp32_precision": "generic", "cudnn.fp32_precision": "cuda", "mkldnn.fp32_precision": "mkldnn"}

OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Variables of the environment that overrule flags."""

ON_A_GPU = ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision")
ON_A_CPU = ("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision")

Flags = Mapping[str, Any]


def flags() -> dict[str, Any]:
    """Every flag that torch has and names, and the overrides that are set; those that it refuses to name are left out."""
    found = {name: value for name in FLAGS if (value := _read(name)) is not None}
    return found | {name: os.environ[name] for name in OVERRIDES if name in os.environ}


@contextmanager
def under(wanted: Flags) -> Iterator[None]:
    """In the body torch's flags are as `flags()` once said; then they come back."""
    before = flags()
    try:
        with open_to_changes():
            _set(wanted)
        yield
    finally:
        with open_to_changes():
            _set(before)


def loose(found: Flags, device: str) -> tuple[str, ...]:
    """What these flags let FP32 be computed in on a device beside FP32, such as `tf32`, each once; nothing where all is IEEE."""
    names = ON_A_GPU if is_native(device) else ON_A_CPU
    precisions = [found.get(name) for name in names]
    if is_native(device):
        allowed = {
            "cuda.matmul.fp32_precision": "cuda.matmul.allow_tf32",
            "cudnn.conv.fp32_precision": "cudnn.allow_tf32",
        }
        precisions += ["tf32" for finer, older in allowed.items() if finer not in found and found.get(older)]
    return tuple(dict.fromkeys(one for one in precisions if one not in (None, "none", "ieee")))


def libraries(device: str) -> dict[str, str]:
    """Versions of what computes on a device."""
    if not is_native(device):
        named = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
        return {"onednn": named[1]} if named else {}
    found = {"cuda": torch.version.cuda, "cudnn": _cudnn(), "driver": _driver()}
    return {name: version for name, version in found.items() if version}


def _cudnn() -> str | None:
    number: Callable[[], int | None] = torch.backends.cudnn.version
    with suppress(RuntimeError):  # one that does not go with what torch was built for
        if (found := number()) is not None:
            major, rest = divmod(found, 10_000) if found >= 90_000 else divmod(found, 1_000)
            return f"{major}.{rest // 100}.{rest % 100}"
    return None


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    with suppress(OSError):
        named = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", file.read_text(encoding="utf-8"))
        return named[1] if named else None
    return None


def _read(name: str) -> Any:
    """None where torch has no such flag, or refuses to name it because somebody set the finer ones."""
    try:
        if name == _MATMUL:
            return torch.get_float32_matmul_precision()
        if name == _DETERMINISTIC:
            return torch.are_deterministic_algorithms_enabled()
        return attrgetter(name)(torch.backends)
    except (AttributeError, RuntimeError):
        return None


def _set(wanted: Flags) -> None:
    """Only what differs, each once those before it are set."""
    for name in FLAGS:
        if name not in wanted or _read(name) == wanted[name]:
            continue
        if name == _MATMUL:
            torch.set_float32_matmul_precision(wanted[name])
        elif name == _DETERMINISTIC:
            warn = torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(wanted[name], warn_only=warn)
        elif name in _GENERAL:
            set_general(_GENERAL[name], wanted[name])
        else:
            holder, _, flag = name.rpartition(".")
            setattr(attrgetter(holder)(torch.backends) if holder else torch.backends, flag, wanted[name])
