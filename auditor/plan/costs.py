"""What every node costs in every precision: FLOPs and bytes from its shapes, time from a device's peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ..numerics.flops import flops_of
from ..numerics.formats import FORMATS
from ..numerics.nodes import row_of, tensors_of
from ..records import Capture
from ..resources import table

DEFAULT_DEVICE = "A100"

TIE = 1e-3
"""What a second counts for where the objective is not time: of plans that are as good, the faster one."""


@dataclass(frozen=True)
class Cost:
    """flops: multiply-adds counted as two. elements: floating tensor elements read and written. free: a view."""

    flops: int
    elements: int
    free: bool


def costs_of(capture: Capture) -> dict[str, Cost]:
    """{node: Cost} from the shapes that were recorded."""
    return costs_in(capture.graph_module.graph)


def costs_in(graph: fx.Graph) -> dict[str, Cost]:
    """The same of any graph with shapes."""
    found = {}
    for node in graph.nodes:
        if node.op == "call_function":
            read = [tensors_of(source.meta.get("val")) for source in node.all_input_nodes]
            tensors = [*(x for group in read for x in group), *tensors_of(node.meta.get("val"))]
            elements = sum(x.numel() for x in tensors if x.is_floating_point())
            found[node.name] = Cost(flops_of(node), elements, _is_free(node))
    return found


def _is_free(node: fx.Node) -> bool:
    """Whether the result lies in the memory of the argument, as a view's does where strides express it."""
    how = row_of(node).view
    return how == "always" or (how == "if_strides_allow" and not _copies(node))


def _copies(node: fx.Node) -> bool:
    """Whether an operation that gives a tensor another shape has to copy it first, since no strides do."""
    sources = node.all_input_nodes
    source = tensors_of(sources[0].meta.get("val")) if sources else []
    result = tensors_of(node.meta.get("val"))
    if not source or not result:
        return False
    try:
        source[0].view(result[0].shape)
    except RuntimeError:
        return True
    return False


def seconds(cost: Cost, precision: str, device: str = DEFAULT_DEVICE) -> float:
    """Roofline time of one node in seconds: the slower of arithmetic and memory traffic."""
    peaks: dict[str, float] = table("plan/devices")[device]
    if cost.free:
        return 0.0
    row = FORMATS[precision]
    arithmetic = cost.flops / (peaks.get(row.speed or "", peaks["fp32"]) * 1e12)
    return max(arithmetic, cost.elements * row.bytes / (peaks["bandwidth"] * 1e9))


def traffic_seconds(bytes: int, device: str = DEFAULT_DEVICE) -> float:
    """Time to move so many bytes once."""
    return bytes / (float(table("plan/devices")[device]["bandwidth"]) * 1e9)


def cast_seconds(elements: int, format: str, device: str = DEFAULT_DEVICE) -> float:
    """Time to read `elements` in FP32 and write them in a format, or the reverse."""
    return traffic_seconds(elements * (FORMATS["fp32"].bytes + FORMATS[format].bytes), device)


def price(objective: str, cost: Cost, elements: int, precision: str, device: str = DEFAULT_DEVICE) -> float:
    """What one node counts for, as the objective has it, in seconds. elements: floating ones that it gives."""
    elapsed = seconds(cost, precision, device)
    if objective == "time":
        return elapsed
    if objective == "flops":
        own = 0.0 if FORMATS[precision].low else seconds(Cost(cost.flops, 0, False), "fp32", device)
    else:
        own = 0.0 if cost.free else traffic_seconds(FORMATS[precision].bytes * elements, device)
    return own + TIE * elapsed


def output_elements(capture: Capture) -> Mapping[str, int]:
    """{node or placeholder: floating elements of its result}."""
    return {
        node.name: sum(x.numel() for x in tensors_of(node.meta.get("val")) if x.is_floating_point())
        for node in capture.graph_module.graph.nodes
    }
