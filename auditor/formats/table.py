"""The one table of number formats; a new format is a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A binary floating-point format. mantissa: stored fraction bits; largest, smallest_*: finite positive values.

    dtype: torch's own type, None where torch has none (tf32 is an arithmetic mode, not a storage type).
    overflows_to: what a value beyond `largest` becomes, "inf", or "largest" (fp8_e4m3 has no infinity; torch saturates
    it from 2.13 on, where it gave NaN before).
    Sources: IEEE 754-2019 (fp16, fp32); bf16 and tf32: NVIDIA A100 whitepaper; fp8: Micikevicius et al. 2022, OCP FP8.
    """

    name: str
    mantissa: int
    min_exponent: int
    largest: float
    dtype: torch.dtype | None
    overflows_to: str = "inf"

    @property
    def smallest_normal(self) -> float:
        """2 ** min_exponent."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The spacing of the numbers around zero."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa)

    @property
    def epsilon(self) -> float:
        """Spacing of the numbers in [1, 2)."""
        return math.ldexp(1.0, -self.mantissa)

    def headroom_bits(self, magnitude: float) -> float:
        """log2(largest / magnitude): doublings left before overflow; inf for 0, negative once it overflows."""
        return math.log2(self.largest) - math.log2(magnitude) if magnitude > 0 else math.inf


_ROWS = (
    Format("fp32", 23, -126, 3.4028234663852886e38, torch.float32),
    Format("tf32", 10, -126, 3.4011621342146535e38, None),
    Format("bf16", 7, -126, 3.3895313892515355e38, torch.bfloat16),
    Format("fp16", 10, -14, 65504.0, torch.float16),
    Format("fp8_e4m3", 3, -6, 448.0, torch.float8_e4m3fn, overflows_to="largest"),
    Format("fp8_e5m2", 2, -14, 57344.0, torch.float8_e5m2),
)
FORMATS = {row.name: row for row in _ROWS}
BY_DTYPE = {row.dtype: row for row in _ROWS if row.dtype is not None}
LOW_DTYPES = (torch.float16, torch.bfloat16)
