"""The table of number formats. Importing this module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import AuditorError

if TYPE_CHECKING:
    import torch


FP32_BYTES = 4
"""Bytes of an FP32 number; low-precision formats have fewer."""


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    mantissa: stored fraction bits. min_exponent: exponent of the smallest normal number. largest: the largest finite
    value. bytes: size of one element in memory. label: the display name, by default the name in capitals. storage: the
    name of torch's dtype, None if torch has none. native: whether torch computes in that dtype; other formats are
    emulated by rounding FP32 results. autocast: whether `torch.autocast` accepts it. loss_scaling: whether the small
    range requires a scaled loss. overflows_to: the result beyond `largest`: "inf", or "largest" if the format has no
    infinity (torch saturates fp8_e4m3 from 2.13 on, and returned NaN before). speed: the column of plan/devices.toml
    with a device's rate; without an entry, FP32's rate is used. Sources: IEEE 754-2019 (fp16, fp32); bf16 and tf32:
    NVIDIA A100 whitepaper; fp8: Micikevicius et al. 2022, OCP FP8.
    """

    name: str
    mantissa: int
    min_exponent: int
    largest: float
    bytes: int
    storage: str | None = None
    native: bool = False
    autocast: bool = False
    loss_scaling: bool = False
    overflows_to: str = "inf"
    speed: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name.upper().replace("_", " "))

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """torch's dtype, None if torch has none (tf32 is an arithmetic mode, not a storage type)."""
        import torch

        return None if self.storage is None else getattr(torch, self.storage)

    @cached_property
    def low(self) -> bool:
        """Whether a number takes fewer bytes than in FP32; an audit accepts only such formats."""
        return self.bytes < FP32_BYTES

    @property
    def smallest_normal(self) -> float:
        """The smallest normal number, 2 ** min_exponent."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa)

    @property
    def epsilon(self) -> float:
        """Spacing of the numbers in [1, 2)."""
        return math.ldexp(1.0, -self.mantissa)


_ROWS = (
    Format("fp64", 52, -1022, 1.7976931348623157e308, 8, "float64", native=True),
    Format("fp32", 23, -126, 3.4028234663852886e38, 4, "float32", native=True, speed="fp32"),
    Format("tf32", 10, -126, 3.4011621342146535e38, 4, speed="tf32"),
    Format("bf16", 7, -126, 3.3895313892515355e38, 2, "bfloat16", native=True, autocast=True, speed="bf16"),
    Format("fp16", 10, -14, 65504.0, 2, "float16", native=True, autocast=True, loss_scaling=True, speed="fp16"),
    Format("fp8_e4m3", 3, -6, 448.0, 1, "float8_e4m3fn", overflows_to="largest", speed="fp8"),
    Format("fp8_e5m2", 2, -14, 57344.0, 1, "float8_e5m2", speed="fp8"),
)
_known = {row.name: row for row in _ROWS}
FORMATS: Mapping[str, Format] = MappingProxyType(_known)
"""{name: Format}."""

DEFAULT = ("fp16", "bf16")
"""Formats that an audit tests by default: GPUs commonly train and run models in them."""


def narrower() -> tuple[str, ...]:
    """Names of the formats with fewer significant bits than FP32, which cannot represent some FP32 numbers exactly."""
    return tuple(name for name, row in FORMATS.items() if row.mantissa < FORMATS["fp32"].mantissa)


def auditable() -> tuple[str, ...]:
    """Names of the formats that an audit accepts, the default formats first."""
    return (*DEFAULT, *(name for name, row in FORMATS.items() if row.low and name not in DEFAULT))


def format_called(given: object) -> object:
    """The format's name, for its name in any case, torch's dtype or the dtype's name: `torch.float16`, `float16` and
    `half` are `fp16`. Other values are returned unchanged."""
    stored = {row.storage: row.name for row in reversed([*FORMATS.values()]) if row.storage}
    names = {"half": "fp16", **stored, **{name: name for name in FORMATS}}
    return names.get(str(given).removeprefix("torch.").lower(), given)


def label(name: str) -> str:
    """The display name of a format or scheme, even of an unknown one: `bf16` -> `BF16`, `fp8_block` -> `FP8 block`."""
    if name in FORMATS:
        return FORMATS[name].label
    family, *rest = name.split("_")
    words = [family.upper()]
    for word in rest:
        has_number = word[-1:].isdigit()
        words.append(word.upper() if has_number else word)
    return " ".join(words)


def format_of(dtype: torch.dtype) -> Format | None:
    """The format in which torch computes with tensors of this dtype; None for discrete, complex and FP8 dtypes."""
    return _by_dtype().get(dtype)


def dtype_of(name: str) -> torch.dtype:
    """The dtype in which torch computes in a format. Raises: AuditorError(slug="no-arithmetic") if torch has none."""
    row = FORMATS[name]
    if not row.native or row.dtype is None:
        raise AuditorError(
            f"torch cannot compute in {row.label}, so no model can run in this format: choose FP16 or BF16",
            slug="no-arithmetic",
        )
    return row.dtype


def runs(name: str) -> bool:
    """Whether torch computes in the format of this name; False for an unknown name."""
    return name in FORMATS and FORMATS[name].native


def is_low(dtype: torch.dtype) -> bool:
    """Whether torch computes in this dtype, and the dtype has fewer bits than FP32."""
    row = _by_dtype().get(dtype)
    return row is not None and row.low


def significant_bits(dtype: torch.dtype) -> int:
    """Number of significant bits of a floating-point dtype, including the implicit bit; 0 for other dtypes."""
    return next((row.mantissa + 1 for row in FORMATS.values() if row.storage and row.dtype is dtype), 0)


@cache
def _by_dtype() -> dict[torch.dtype, Format]:
    return {row.dtype: row for row in FORMATS.values() if row.native and row.dtype is not None}


def dtype_name(dtype: torch.dtype) -> str:
    """`str(dtype)` without `torch.`, such as `float16`."""
    return str(dtype).removeprefix("torch.")
