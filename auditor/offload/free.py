"""What memory the machine has left for an audit, and whether a model of some size needs a limit to fit in there."""

from __future__ import annotations

import re
from pathlib import Path

HELD = 3.0
"""Times its FP32 weights that the audit of a model holds, in both of its processes together, where nothing limits it."""

EACH = 0.4
"""Share of what is free that each process may hold then."""

_MEMINFO, _CGROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def fitting(weights: int) -> int | None:
    """The limit under which a model is audited whose FP32 weights take so many bytes; None where it fits as it is, or where
    the system does not say what is free."""
    left = free()
    return int(EACH * left) if left is not None and HELD * weights > left else None


def free() -> int | None:
    """Bytes that the machine has available, or the group that this process is in, where that is less."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else min([1024 * int(found[1]), *_left_in_group()])


def _left_in_group() -> list[int]:
    for most, used in _GROUPS:
        try:
            limit, taken = ((_CGROUPS / name).read_text(encoding="utf-8").strip() for name in (most, used))
            return [max(int(limit) - int(taken), 0)]
        except (OSError, ValueError):  # "max": without a limit
            continue
    return []
