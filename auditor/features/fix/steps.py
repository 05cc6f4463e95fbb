"""Fixes of training steps: the order of an optimizer's calls, and what a rehearsal names."""

from __future__ import annotations

from collections.abc import Callable

from ...loading.target import parse
from ...records import Fixes


def is_step(target: str) -> bool:
    """Whether a TARGET names a training step: a function of a file that calls `backward`."""
    return False


def fix_step(target: str, seed: int, tell: Callable[[str], object] = str) -> Fixes:
    """Search for changes of a training step. See `find_fixes`."""
    raise NotImplementedError(parse(target).name)
