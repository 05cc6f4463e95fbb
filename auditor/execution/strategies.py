"""A capture under a strategy: what that means for nodes, parameters, buffers and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..artefact.base import Strategy
from ..artefact.strategies import strategy_of
from ..records import Call, Capture, Node
from .nesting import Boundary, Layout, Passage, Steps, agreed, boundaries, layout_of
from .running import Running, Setting, Wrapping


def running(
    capture: Capture,
    strategy: str,
    precision_of: Callable[[str], str],
    format: str,
    layout: Layout | None = None,
) -> Running:
    """A capture under `strategy`, wrapped as a plan that gives every owner its precision would wrap it.

    layout: what it has in common with other ways to run it, where that is known.
    """
    how = strategy_of(strategy)
    layout = layout or layout_of(capture, how)
    precision_of = agreed(capture, layout.owners, precision_of)
    wrapped = boundaries(capture, strategy, precision_of, layout)
    passage = Passage(capture, wrapped)
    keeping = any(boundary.keep for boundary in wrapped.values())
    stored = _stored(capture, how, layout, precision_of, format) if how.stores else {}

    def looks_at(node: Node) -> str:
        """Precision of the scope in which Python looks at a dtype: where it was handed on as an argument, the caller's."""
        depth = next((call.depth for call in reversed(node.calls) if not call.handed), 0)
        innermost = next(call for call in reversed(passage.enclosing(node.name)) if call.depth <= depth)
        return how.computes_in(wrapped[innermost.path].precision)

    literals = {
        name: found[format]
        for name, node in capture.nodes.items()
        if format in (found := how.literals(node)) and looks_at(node) != "fp32"
    }

    def setting(name: str) -> Setting:
        if passage.keeps(name):
            return Setting("fp32", autocast=False, wins=True, kept=True)
        around = passage.enclosing(name)
        precision = how.computes_in(wrapped[around[-1].path].precision)
        region = capture.nodes[name].region if name in capture.nodes else None
        opens = around[-1] if how.regional else _opening(around, wrapped) if keeping else None
        inside = region is not None and opens is not None and opens.depth >= region.depth
        low = opens is not None and how.computes_in(wrapped[opens.path].precision) != "fp32"
        return Setting(precision, low, wins=inside)

    def raised(source: str, reader: str) -> Steps:
        return ("fp32",) if source in stored else passage.steps(source, reader)

    crossing = raised if how.raises_weights else passage.steps
    return Running(setting, crossing, stored, literals, Wrapping(strategy, format, wrapped, keeping))


def _opening(around: Sequence[Call], wrapped: Mapping[str, Boundary]) -> Call | None:
    """The innermost scope that enters or leaves autocast, under a strategy that does so only where functions are kept."""
    return next((c for c in reversed(around) if (b := wrapped[c.path]).keep or b.precision == "fp32"), None)


def _stored(
    capture: Capture, how: Strategy, layout: Layout, precision_of: Callable[[str], str], format: str
) -> dict[str, str]:
    """Precision of every placeholder that the strategy stores: FP32 as soon as one of the scopes with a say is."""
    found = {}
    for placeholder in capture.placeholders:
        if placeholder.kind not in how.stores or placeholder.name in layout.low:
            continue
        if placeholder.kind == "input":
            found[placeholder.name] = precision_of("")
        elif placeholder.kind in ("parameter", "buffer") or format in placeholder.made_in:
            owners = layout.deciding.get(placeholder.name, ())
            low = bool(owners) and all(precision_of(owner) != "fp32" for owner in owners)
            found[placeholder.name] = format if low else "fp32"
    return found


def plain(format: str) -> Callable[[str], str]:
    """Everything low: what a user gets without a plan."""
    return lambda owner: format
