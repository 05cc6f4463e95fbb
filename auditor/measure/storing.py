"""Weights that were stored in FP16 or BF16: what rounding them to each format can still cost, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..isolation.members import size_of
from ..numerics.formats import FORMATS, Format, label
from ..numerics.histogram import merged
from ..records import Capture, Magnitudes, Subject


def storing(
    subject: Subject, capture: Capture, ranges: Mapping[str, Magnitudes], formats: tuple[str, ...]
) -> tuple[str, ...]:
    """A sentence for each format, where parameters of the model were stored low and are raised; otherwise none."""
    if not subject.stored_low or subject.raised == "kept":
        return ()
    total = size_of(subject.model)
    stored = {row.name: count for row in FORMATS.values() if (count := subject.stored_low.get(row.storage or "", 0))}
    read = [ranges[p.name] for p in capture.placeholders if p.kind == "parameter" and p.name in ranges]
    return tuple(_of(FORMATS[fmt], stored, total, merged(read)) for fmt in formats)


def _of(fmt: Format, stored: Mapping[str, int], total: int, found: Magnitudes) -> str:
    name = label(fmt.name)
    if fmt.name in stored:
        share = "all" if stored[fmt.name] == total else f"{stored[fmt.name]:,} of {total:,}"
        return f"The weights came in {name}, {share} of them: it takes these as they are, so no error under {name} comes from rounding them."
    above = math.floor(math.log2(fmt.largest)) + 1
    large = sum(count for exponent, count in found.exponents.items() if exponent >= above)
    small = sum(count for exponent, count in found.exponents.items() if exponent < fmt.min_exponent)
    came = " and ".join(map(label, stored))
    if not large and not small:
        fits = fmt.mantissa >= max(FORMATS[source].mantissa for source in stored) and sum(stored.values()) == total
        if fits:
            return f"The weights came in {came}, and all lie in {name}'s range, which has as many bits: it takes them as they are too."
        return f"The weights came in {came}; all lie in {name}'s range, and rounding them to it is part of its errors."
    becomes = "infinite" if fmt.overflows_to == "inf" else "its largest number"
    return (
        f"The weights came in {came}, whose range {name} does not have: of {found.nonzero + found.zeros:,}, {large:,} are "
        f"{2.0**above:,.0f} or more and become {becomes}, and {small:,} lie below {fmt.smallest_normal:.2g}, where {name} "
        "may lose bits, or all of them."
    )
