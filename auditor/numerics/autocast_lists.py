"""The lists of operations by which torch's autocast decides, as the torch at hand registers them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ..resources import table

Treatment = Literal["lower", "fp32", "fp32_unless_dtype", "promote", "banned", "none"]

LISTS: Mapping[str, Treatment] = MappingProxyType(
    {
        "lower_precision": "lower",
        "fp32": "fp32",
        "fp32_append_dtype": "fp32",
        "fp32_unless_dtype_given": "fp32_unless_dtype",
        "promote": "promote",
        "banned": "banned",
    }
)
"""{list in autocast.toml: what autocast does with its operations}."""

OF_CUDA_BUILDS = frozenset({"_cudnn_rnn", "miopen_rnn"})
"""Registered only where torch is built for a GPU: the kernels of `lstm` and its like, which autocast.toml lists."""

UNLISTED: Treatment = "fp32"
"""What is assumed of an operation that torch registers, and that neither its header nor autocast.toml lists."""

_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_HEADER = "include/ATen/autocast_mode.h"
_MACROS: Mapping[str, Treatment] = {
    "LOWER_PRECISION_FP": "lower",
    "FP32": "fp32",
    "FP32_SET_OPT_DTYPE": "fp32_unless_dtype",
    "DIFFERENT_REDISPATCH_SIGNATURE": "fp32",
    "PROMOTE": "promote",
}
"""{macro of torch's header, after AT_FORALL_: what CUDA's autocast does with its operations}."""

_MACRO = re.compile(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*)")
_ENTRY = re.compile(r"_\((\w+)(?:,\s*(\w+))?\)")
_NAMED = re.compile(r'"([\w.]+)"')


@cache
def autocast_lists(device: str) -> Mapping[str, Treatment]:
    """{operation, such as `pow.Scalar`, or `exp` for all its overloads: how autocast on `device` treats it}.

    The names are those that the torch at hand registers. Its own header says how CUDA's autocast treats them;
    autocast.toml completes it, and lists operations made of registered ones. Without torch: autocast.toml alone.
    """
    rows = table("numerics/autocast")[device]
    listed = _listed(rows)
    names = registered(device)
    if names:
        own = of_header() if device == "cuda" else {}
        listed = {name: own.get(name, listed.get(name, UNLISTED)) for name in sorted(names)}
    composites = _listed(rows.get("composites", {}))
    return MappingProxyType({**composites, **listed})


@cache
def registered(device: str) -> frozenset[str]:
    """The ATen operations for which the torch at hand registers a kernel of autocast; empty without torch."""
    try:
        import torch
    except ImportError:
        return frozenset()
    names = torch._C._dispatch_get_registrations_for_dispatch_key(_KEYS[device])
    aten = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    return frozenset(aten - OF_CUDA_BUILDS)


@cache
def of_header() -> Mapping[str, Treatment]:
    """How CUDA's autocast treats operations, by the C++ header that torch installs; empty if it does not install one."""
    import torch

    file = Path(torch.__file__).parent / _HEADER
    if not file.is_file():
        return {}
    result = dict[str, Treatment]()
    for macro, body in _MACRO.findall(file.read_text(encoding="utf-8")):
        treatment = _MACROS.get(macro)
        if treatment is None:
            continue
        names = [".".join(filter(None, entry)) for entry in _ENTRY.findall(body)]
        names += _NAMED.findall(body)
        result |= dict.fromkeys(names, treatment)
    return result


def _listed(rows: Mapping[str, list[str]]) -> dict[str, Treatment]:
    return {name: treatment for key, treatment in LISTS.items() for name in rows.get(key, ())}
