"""How far the activations of a model that was stored in BF16 are from the end of FP16's range, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..numerics.formats import FORMATS, label
from ..records import Capture, Magnitudes, Subject
from ..rulebook.values import literal_results


def range_note(subject: Subject, capture: Capture, ranges: Mapping[str, Magnitudes], formats: tuple[str, ...]) -> str:
    """How far the activations are from the end of FP16's range, for a model that was stored, and so trained, in a format
    without that limit; "" if FP16 is not audited, or the weights were stored otherwise.

    Results that are constants of the code, such as a mask's -1e9, do not count.
    """
    fp16 = FORMATS["fp16"]
    wider = [
        row for row in FORMATS.values() if row.largest > fp16.largest and subject.stored_low.get(row.storage or "")
    ]
    written = literal_results(capture, ranges)
    largest_of = {name: ranges[name].max_abs for name in capture.nodes if name in ranges and name not in written}
    if "fp16" not in formats or not wider or not largest_of:
        return ""
    name = max(largest_of, key=largest_of.__getitem__)
    node, largest = capture.nodes[name], largest_of[name]
    where = node.owner or node.op
    place = f"{where} ({node.source})" if node.source else where
    came = label(wider[0].name)
    words = f"The model was stored in {came}, and FP16 ends at {fp16.largest:,.0f}. The largest activation on these inputs, in {place}, is {largest:.3g}"
    if largest > fp16.largest:
        return f"{words}, which overflows in FP16."
    return f"{words}, {fp16.largest / largest if largest else math.inf:.3g} times below that. Larger inputs may exceed FP16, but not {came}."
