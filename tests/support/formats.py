"""Formats that only a test knows: by IEEE 754's scheme, in the table for as long as a body runs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from auditor.numerics import formats
from auditor.numerics.formats import Format


def ieee_format(name: str, exponent_bits: int, mantissa: int) -> Format:
    """A format with a sign, a biased exponent whose top value encodes Inf and NaN, and a fraction."""
    bias = 2 ** (exponent_bits - 1) - 1
    largest = math.ldexp(2 - math.ldexp(1.0, -mantissa), bias)
    bytes_taken = -(-(1 + exponent_bits + mantissa) // 8)
    return Format(name, mantissa, 1 - bias, largest, bytes_taken)


@contextmanager
def temporary_format(row: Format) -> Iterator[Format]:
    """The format is in the table of formats while the body runs."""
    assert row.name not in formats.FORMATS
    formats._known[row.name] = row
    formats._by_dtype.cache_clear()
    try:
        yield row
    finally:
        del formats._known[row.name]
        formats._by_dtype.cache_clear()
