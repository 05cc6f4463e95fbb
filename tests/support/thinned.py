"""Parameters whose neighbours prove much the same: some for the quick suite, the others for the slow one."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(rows: Iterable[Any], every: int = 3) -> list[Any]:
    """The first of `every` so many stays quick."""
    packed = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=() if at % every == 0 else pytest.mark.slow) for at, row in enumerate(packed)]
