"""The table of number formats; new formats can be registered. Importing this module does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import AuditorError

if TYPE_CHECKING:
    import torch

NAME = re.compile(r"[a-z]+[0-9][a-z0-9_]*")
"""Pattern of format names. The digit in a format's name distinguishes it from other keys in JSON documents."""

_WIDEST_MANTISSA, _LEAST_EXPONENT, _LARGEST = 22, -126, 3.4028234663852886e38
_WIDE = 4
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

    @classmethod
    def ieee(cls, name: str, exponent_bits: int, mantissa: int) -> Format:
        """A format by IEEE 754's scheme: a sign, a biased exponent whose top value encodes Inf and NaN, and a fraction.

        Raises: AuditorError(slug="bad-format") if a number of bits is not a whole number from 1 to FP64's.
        """
        for what, bits, most in (("exponent", exponent_bits, 11), ("fraction", mantissa, 52)):
            if type(bits) is not int or not 1 <= bits <= most:
                raise AuditorError(
                    f"the format {name!r} must have 1 to {most} {what} bits, not {bits!r}", slug="bad-format"
                )
        bias = 2 ** (exponent_bits - 1) - 1
        largest = math.ldexp(2 - math.ldexp(1.0, -mantissa), bias)
        return cls(name, mantissa, 1 - bias, largest, -(-(1 + exponent_bits + mantissa) // 8))

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """torch's dtype, None if torch has none (tf32 is an arithmetic mode, not a storage type)."""
        import torch

        return None if self.storage is None else getattr(torch, self.storage)

    @property
    def low(self) -> bool:
        """Whether a number takes fewer bytes than in FP32; an audit accepts only such formats."""
        return self.bytes < _WIDE

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
"""{name: Format}: built-in and registered formats."""

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
    return " ".join([family.upper(), *(word.upper() if word[-1:].isdigit() else word for word in rest)])


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


def register(row: Format) -> None:
    """Add a format to the table of this process, so that audits accept its name.

    Raises: AuditorError(slug="bad-format") if its numbers describe no format narrower than FP32, its name is invalid or
    taken, or the torch dtype in `storage` does not exist or represents other numbers.
    """
    problem = _problem(row)
    if problem is not None:
        raise AuditorError(f"the format {row.name!r} cannot be registered: {problem}", slug="bad-format")
    _known[row.name] = row
    _by_dtype.cache_clear()


@contextmanager
def temporary_format(row: Format) -> Iterator[Format]:
    """Register a format within the `with` block only. Raises: the errors of `register`."""
    register(row)
    try:
        yield row
    finally:
        del _known[row.name]
        _by_dtype.cache_clear()


def _problem(row: Format) -> str | None:
    """Why a format cannot be registered, else None. No format may exceed FP32: values are rounded from FP32."""
    if not NAME.fullmatch(row.name):
        return "a name has lower-case letters followed by a digit, for instance e6m9"
    if row.name in FORMATS:
        return "the name is already taken"
    broken = [key for key in ("mantissa", "min_exponent", "bytes") if type(getattr(row, key)) is not int]
    if broken:
        return f"{broken[0]} must be a whole number, not {getattr(row, broken[0])!r}"
    if not 1 <= row.mantissa <= _WIDEST_MANTISSA:
        return f"it must have 1 to {_WIDEST_MANTISSA} fraction bits, not {row.mantissa}"
    if not _LEAST_EXPONENT <= row.min_exponent <= 0:
        return f"its smallest exponent must be from {_LEAST_EXPONENT} to 0, not {row.min_exponent}"
    on_grid = 1 <= row.largest <= _LARGEST and math.ldexp(math.frexp(row.largest)[0], row.mantissa + 1).is_integer()
    if not on_grid:
        return f"its largest value must be representable, and from 1 to FP32's largest, not {row.largest}"
    if not 1 <= row.bytes < _WIDE:
        return f"an element must take 1 to {_WIDE - 1} bytes, not {row.bytes}"
    if row.overflows_to not in ("inf", "largest"):
        return f"overflows_to must be 'inf' or 'largest', not {row.overflows_to!r}"
    return _storage_problem(row)


def dtype_name(dtype: torch.dtype) -> str:
    """`str(dtype)` without `torch.`, such as `float16`."""
    return str(dtype).removeprefix("torch.")


def _storage_problem(row: Format) -> str | None:
    if row.autocast and not row.native:
        return "autocast accepts only formats that torch computes in"
    if row.storage is None:
        return "torch computes only in its own types: name one as storage" if row.native else None
    import torch

    dtype = getattr(torch, row.storage, None)
    if not isinstance(dtype, torch.dtype):
        return f"torch has no type {row.storage!r}"
    if not _holds(dtype, row):
        return f"{row.storage} represents other numbers: leave storage out, and the audit rounds to the format itself"
    if not row.native:
        return None
    taken = format_of(dtype)
    return f"{taken.name} already computes in {row.storage}" if taken else f"torch does not compute in {row.storage}"


def _holds(dtype: torch.dtype, row: Format) -> bool:
    """Whether a torch dtype represents the same numbers as the Format, so that rounding to both is equal."""
    import torch

    if not dtype.is_floating_point:
        return False
    limits, beyond_one = torch.finfo(dtype), torch.tensor([1 + row.epsilon, 1 + row.epsilon / 2])
    return (
        (limits.smallest_normal, limits.max, dtype.itemsize) == (row.smallest_normal, row.largest, row.bytes)
        and beyond_one.to(dtype).tolist() == [1 + row.epsilon, 1.0]  # finfo.eps is wrong for some FP8 types
    )
