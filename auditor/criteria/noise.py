"""What is an error, and what FP32 does by itself when it is run again. Importing this needs no torch."""

from __future__ import annotations

import math

FLOOR = 3.0
"""How many times what runs in FP32 differ by an error has to be, to be called one."""


def floor_of(error: float, joint: float) -> float:
    """Up to what nothing is called an error, where runs in FP32 differ by that much.

    error: by what the budget measures; joint: relative L2 of all outputs. 0 where the outputs of runs have so little in
    common that everything would pass.
    """
    return FLOOR * error if FLOOR * joint < 1 and math.isfinite(error) else 0.0
