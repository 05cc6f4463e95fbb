"""Selects the device of an audit: a CPU, which emulates a GPU, or a device that runs the formats natively.

A native device is a GPU, or the CPU itself as the target of the audit.

Importing this file does not import torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..errors import AuditorError
from ..resources import table
from .cpus import KINDS, cpu_name

CPU = "cpu"
"""The CPU that emulates a GPU. The device type of every CPU."""

NATIVE_CPU = "cpu:0"
"""The CPU that runs the formats with its own kernels. For torch it is the same device as `cpu`."""

TARGETS = ("cuda", "cpu")
"""Device types whose kernels and autocast lists an audit can follow."""

NATIVE = ["cuda"]
"""Device types that have CUDA's formats, kernels and autocast lists."""


def kind_and_number(asked: object) -> tuple[str, str]:
    """Split auto, cpu, cuda, cuda:1 or a torch.device into (type, number or ""). Raises: ValueError for others."""
    kind, _, index = str(asked).partition(":")
    known = (kind == "auto" and not index) or (kind == CPU and index in ("", "0")) or kind in NATIVE
    if not known or not (index.isdigit() or str(asked) == kind):
        raise ValueError(asked)
    return kind, index


def choose(asked: object) -> str:
    """The device, `cpu` or `cuda:0`, for a valid request. Raises: AuditorError(slug="no-cuda") if torch does not see
    it."""
    kind, index = kind_and_number(asked)
    if kind == "auto":
        kind = next((kind for kind in NATIVE if _module(kind).is_available()), CPU)
    if kind == CPU:
        return CPU
    device = _module(kind)
    there = [f"{kind}:{number}" for number in range(device.device_count() if device.is_available() else 0)]
    if there and (result := f"{kind}:{index or device.current_device()}") in there:
        return result
    sees = f"{', '.join(there)} only: use one of them" if there else "no CUDA device: use cpu or auto"
    raise AuditorError(f"device {asked} does not exist, since torch sees {sees}", slug="no-cuda")


def follow(asked: object, found: Collection[str]) -> str:
    """The device for a model with tensors on the devices `found`: the same GPUs, unless the user requested others.

    Several GPUs are joined by commas; the model remains spread over these GPUs. Raises: the errors of `choose`.
    """
    kind, index = kind_and_number(asked)
    natives = sorted(device for device in found if type_of(device) in NATIVE)
    return ",".join(natives) if natives and not index and kind in ("auto", type_of(natives[0])) else choose(asked)


def is_spread(device: str) -> bool:
    """Whether `device` names several GPUs, joined by commas."""
    return "," in device


def is_native(device: str) -> bool:
    """Whether the device runs the formats natively: a GPU, or the CPU as the audit's target."""
    return device != CPU


def is_gpu(device: str) -> bool:
    """Whether tensors have to be moved from the CPU to the device."""
    return type_of(device) != CPU


_TARGET: ContextVar[str] = ContextVar("target", default="cuda")


def target_type() -> str:
    """The device type whose kernels and autocast lists apply to the calling code: `cuda`, emulated or not, or `cpu`."""
    return _TARGET.get()


@contextmanager
def on_target(device: str) -> Iterator[None]:
    """In the `with` block, in this thread, the device's own kernels and autocast lists apply: see `target_type`."""
    before = _TARGET.set(CPU if device == NATIVE_CPU else "cuda")
    try:
        yield
    finally:
        _TARGET.reset(before)


def type_of(device: str) -> str:
    """The device's type, as `torch.autocast` takes it."""
    return device.partition(":")[0]


def name_of(device: str) -> str:
    """The device's product name; for several GPUs, each name with its count."""
    if device == NATIVE_CPU:
        return cpu_name()
    if not is_gpu(device):
        return device
    names = Counter(str(_module(type_of(one)).get_device_name(one)) for one in device.split(","))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())


def gpus() -> tuple[str, ...]:
    """The rows of plan/devices.toml for GPUs."""
    return tuple(row for row in table("plan/devices") if row not in KINDS)


def row_of(name: str) -> str | None:
    """The row of plan/devices.toml for a GPU's name: `NVIDIA H100 80GB HBM3` -> `H100`; laptop variants have none."""
    rows = (row for row in gpus() if re.search(rf"(?<!\w){row}(?!\w)", name))
    return None if "Laptop" in name else max(rows, key=len, default=None)


def has_clock(device: str) -> bool:
    """Whether times on the device count: on the CPU as the target, or on one GPU with its own timer."""
    if device == NATIVE_CPU:
        return True
    return is_gpu(device) and not is_spread(device) and hasattr(_module(type_of(device)), "Event")


def free_device_memory(device: str) -> None:
    """Return unused memory in torch's cache to the device."""
    if is_gpu(device):
        _module(type_of(device)).empty_cache()


def libraries(device: str) -> dict[str, str]:
    """Versions of the libraries that compute on a device."""
    import torch

    if not is_gpu(device):
        named = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
        return {"onednn": named[1]} if named else {}
    result: dict[str, Any] = {"cuda": torch.version.cuda}
    with suppress(RuntimeError):  # an installed cuDNN that does not match torch's build
        result["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    with suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        result["driver"] = next(iter(re.findall(r"Module\s+(?:for \S+\s+)?([\d.]+)", driver)), None)
    return {name: str(version) for name, version in result.items() if version}


def _module(kind: str) -> Any:
    import torch

    return torch.get_device_module(kind)
