"""The device that an audit runs on: a CPU, which imitates a GPU, or a GPU, which runs the formats natively.

Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .errors import AuditorError

CPU = "cpu"

NATIVE = ["cuda"]
"""Types of devices with CUDA's formats, kernels and autocast lists."""


def check_device(asked: object) -> tuple[str, str]:
    """Type and number of what was asked for; the number may be "". Raises: AuditorError(slug="bad-option")."""
    kind, _, index = str(asked).partition(":")
    known = (kind == "auto" and not index) or (kind == CPU and index in ("", "0")) or kind in NATIVE
    if not known or not (index.isdigit() or str(asked) == kind):
        raise AuditorError(
            f"devices are auto, cpu, cuda and cuda:N, not {asked}: on a cpu the formats of a GPU are imitated",
            slug="bad-option",
        )
    return kind, index


def chosen(asked: object) -> str:
    """`cpu` or `cuda:0`, for one of auto, cpu, cuda, cuda:1, or for such a torch.device.

    Raises: AuditorError(slug="bad-option") for a device that no audit runs on, "no-cuda" for one that is not there.
    """
    kind, index = check_device(asked)
    if kind == "auto":
        there = next((kind for kind in NATIVE if _module(kind).is_available()), None)
        return f"{there}:{_module(there).current_device()}" if there else CPU
    if kind == CPU:
        return CPU
    device = _module(kind)
    if not device.is_available():
        raise AuditorError(f"{asked} was asked for, but torch sees no CUDA device: use cpu or auto", slug="no-cuda")
    number = int(index) if index else int(device.current_device())
    if number >= device.device_count():
        there = ", ".join(f"{kind}:{n}" for n in range(device.device_count()))
        raise AuditorError(f"{asked} was asked for, but torch sees {there} alone: use one of them", slug="no-cuda")
    return f"{kind}:{number}"


def is_native(device: str) -> bool:
    """Whether formats run natively on what `chosen` chose."""
    return device != CPU


def type_of(device: str) -> str:
    """The type of what `chosen` chose, as `torch.autocast` takes it."""
    return device.partition(":")[0]


def name_of(device: str) -> str:
    """What its maker calls what `chosen` chose."""
    return str(_module(type_of(device)).get_device_name(device)) if is_native(device) else device


def has_clock(device: str) -> bool:
    """Whether what `chosen` chose is a GPU that times what it runs by itself."""
    return is_native(device) and hasattr(_module(type_of(device)), "Event")


def let_go(device: str) -> None:
    """Memory that torch keeps for later goes back to what `chosen` chose."""
    if is_native(device):
        _module(type_of(device)).empty_cache()


def generators() -> list[Callable[[], None]]:
    """What puts the generators of all GPUs back as they are now; a GPU that has not been used is not started."""
    used = [device for device in map(_module, NATIVE) if device.is_initialized()]
    return [partial(device.set_rng_state_all, device.get_rng_state_all()) for device in used]


def _module(kind: str) -> Any:
    import torch

    return torch.get_device_module(kind)
