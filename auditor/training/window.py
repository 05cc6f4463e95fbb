"""The loss scales that FP16 gradients can live with."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..numerics.formats import FORMATS
from ..numerics.histogram import flushed, largest_scale, merged, subnormal
from ..records import Magnitudes
from ..records.training import LossScale

ALLOWED = 0.01
"""Share of the non-zero low gradients that may be flushed to zero."""

HEADROOM = 16.0
"""The scale to start with leaves room for gradients to grow by this factor, where the window is as wide."""

_HIGHEST = 126
FP16 = FORMATS["fp16"]


def loss_scale(low: Mapping[str, Magnitudes], allowed: float = ALLOWED) -> LossScale | None:
    """The window for gradients that are low, by module; None where none is, or all are zero."""
    pool = merged(low.values())
    if not pool.nonzero:
        return None
    top = min(math.floor(math.log2(largest_scale(pool, FP16))), _HIGHEST)
    needed = next(k for k in range(min(0, top), _HIGHEST + 400) if flushed(pool.exponents, FP16, k) <= allowed)
    largest = max(low, key=lambda module: low[module].max_abs)
    hungry = max(low, key=lambda module: _lost(low[module], top))
    open_ = needed <= top
    shifts = range(min(0, needed, top) - 4, max(needed, top) + 5)
    return LossScale(
        minimum=math.ldexp(1.0, needed),
        maximum=math.ldexp(1.0, top),
        init=max(math.ldexp(1.0, needed), math.ldexp(1.0, top) / HEADROOM) if open_ else None,
        flushed_unscaled=flushed(pool.exponents, FP16),
        allowed=allowed,
        closed_by=None if open_ else largest,
        largest=largest,
        starved=hungry if _lost(low[hungry], top) else None,
        flushed={k: flushed(pool.exponents, FP16, k) for k in shifts},
        subnormal={k: subnormal(pool.exponents, FP16, k) for k in shifts},
    )


def _lost(found: Magnitudes, shift: int) -> int:
    """How many gradients of a module are flushed at the top of the window."""
    return round(flushed(found.exponents, FP16, shift) * found.nonzero)


def scaler_code(init: float) -> str:
    """The GradScaler to start with, as code; everything but the scale is torch's default, spelt out."""
    return f"GradScaler(init_scale={init:.10g}, growth_factor=2, backoff_factor=0.5, growth_interval=2000)"
