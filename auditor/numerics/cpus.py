"""What this machine's CPU is: its name, its instructions for low precision, and the kernels that torch runs on it.

Importing this file does not import torch.
"""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

KINDS = {
    "CPU with AMX-FP16": ("amx_fp16",),
    "CPU with AMX": ("amx_bf16", "avx512_fp16"),
    "CPU with AVX-512 BF16": ("avx512_bf16",),
    "CPU with AVX-512": ("avx512f",),
    "CPU": (),
}
"""{row of plan/devices.toml: flags in /proc/cpuinfo of the CPUs that it describes}; the first that fits counts."""

MAX_ISA = "ONEDNN_MAX_CPU_ISA"
"""Environment variable that keeps oneDNN from newer instructions."""

_EXECUTED = re.compile(
    r"^onednn_verbose,.*?\bexec,cpu,(?P<primitive>\w+),(?P<kernel>[^,]+),[^,]*,src[:_](?P<dtype>\w+?):"
)
_ISA = re.compile(r"^onednn_verbose,.*\bcpu,isa:(?P<isa>.+)$")
_DTYPES = {"f16": "FP16", "bf16": "BF16", "f32": "FP32"}
"""{oneDNN's name of a dtype: the label of the format}."""


def cpu_name() -> str:
    """The product name of this machine's CPU; its architecture, if the system does not say."""
    return _listed("model name") or platform.machine() or "cpu"


def cpu_row() -> str:
    """The row of plan/devices.toml for this machine's CPU."""
    flags = cpu_flags()
    return next(row for row, needed in KINDS.items() if flags.issuperset(needed))


def cpu_flags() -> frozenset[str]:
    """Flags of /proc/cpuinfo, such as `amx_bf16`, without those that ONEDNN_MAX_CPU_ISA forbids."""
    flags = set((_listed("flags") or _listed("Features")).split())
    most = os.environ.get(MAX_ISA, "").upper()
    if most and most not in ("ALL", "DEFAULT"):
        allowed = {"amx": "AMX" in most, "avx512_fp16": "FP16" in most, "avx512_bf16": "BF16" in most}
        allowed["avx512"] = "AVX512" in most or "AVX10" in most
        for prefix, is_allowed in allowed.items():
            above = any(newer in most for newer in ("AMX", "AVX10"))
            if not is_allowed and not (above and prefix != "amx"):
                flags = {flag for flag in flags if not flag.startswith(prefix)}
    return frozenset(flags)


@cache
def _listed(field: str) -> str:
    """The value of a field of /proc/cpuinfo for the first core; "" without the field."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == field:
                return value.strip()
    return ""


def isa_in(lines: Iterable[str]) -> str:
    """The instructions that oneDNN uses, from its verbose output; "" if the output does not name them."""
    matches = filter(None, map(_ISA.match, lines))
    return next((each["isa"].strip() for each in matches), "")


def kernels_in(lines: Iterable[str]) -> Counter[str]:
    """{`matmul in BF16: brg_matmul:avx10_1_512_amx`: number of calls} from oneDNN's verbose output.

    Reorders, which only change the layout of tensors, are left out.
    """
    result = Counter[str]()
    for match in filter(None, map(_EXECUTED.match, lines)):
        dtype = _DTYPES.get(match["dtype"], match["dtype"])
        if match["primitive"] != "reorder":
            result[f"{match['primitive']} in {dtype}: {match['kernel']}"] += 1
    return result
