"""Sizes of memory as people write them: 4GB, 512MiB.

Importing this needs no torch.
"""

from __future__ import annotations

import re

from .errors import AuditorError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size_of(text: object) -> int:
    """Bytes, as in 4GB, 512MiB, 1.5g or 4000000000. Raises: AuditorError(slug="bad-option")."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size <= 0:
        raise AuditorError(f"memory is a size such as 4GB or 512MiB, not {text}", slug="bad-option")
    return size


def words(size: float) -> str:
    """A size as it may be given again: 4GB, 1.5GB, 650MB; the last place is rounded up."""
    if size > 99 * 10**7:
        return f"{-int(-size * 10 // 10**9) / 10:g}GB"
    return f"{-int(-size // 10**7) * 10}MB"
