"""The two ways a model is run low: what each strategy means for nodes, parameters, buffers and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..records import Capture, ScopeChoice
from .execute import Running, Setting
from .nesting import Passage, agreed, boundaries

STRATEGIES = ("autocast", "cast")


def running(capture: Capture, strategy: str, precision_of: Callable[[str], str], format: str) -> Running:
    """A capture under `strategy`, wrapped as a plan that gives every owner its precision would wrap it.

    autocast: weights and inputs stay FP32, low scopes run under autocast. cast: every floating parameter and buffer is
    stored in the precision of the scopes that read it (FP32 as soon as one of them is), and inputs in that of the root.
    """
    autocast = strategy == "autocast"
    precision_of = agreed(capture, precision_of)
    wrapped = boundaries(capture, strategy, precision_of)
    passage = Passage(capture, wrapped)

    def setting(name: str) -> Setting:
        innermost = passage.enclosing(name)[-1]
        precision = wrapped[innermost.path].precision
        region = capture.nodes[name].region if name in capture.nodes else None
        inside = region is not None and innermost.depth >= region.depth
        return Setting(precision, autocast and precision != "fp32", wins=autocast and inside)

    if autocast:
        changed = {n.name: n.autocast_literals[format] for n in capture.nodes.values() if format in n.autocast_literals}
        return Running(setting, passage.steps, {}, changed)
    readers = readers_of(capture)
    stored = {}
    for placeholder in capture.placeholders:
        if placeholder.kind == "input":
            stored[placeholder.name] = precision_of("")
        elif placeholder.kind in ("parameter", "buffer") or format in placeholder.made_in:
            owners = readers.get(placeholder.name, ())
            low = bool(owners) and all(precision_of(owner) != "fp32" for owner in owners)
            stored[placeholder.name] = format if low else "fp32"
    changed = {n.name: n.literals[format] for n in capture.nodes.values() if format in n.literals}
    return Running(setting, passage.steps, stored, changed)


def readers_of(capture: Capture) -> dict[str, tuple[str, ...]]:
    """{placeholder: owners of the nodes that read it}."""
    names = {placeholder.name for placeholder in capture.placeholders}
    readers: dict[str, dict[str, None]] = {}
    for node in capture.nodes.values():
        for source in node.inputs:
            if source in names:
                readers.setdefault(source, {})[node.owner] = None
    return {name: tuple(owners) for name, owners in readers.items()}


def plain(format: str) -> Callable[[str], str]:
    """Everything low: what a user gets without a plan."""
    return lambda owner: format


def scoped(scopes: Mapping[str, ScopeChoice]) -> Callable[[str], str]:
    """Precision of any module path: its own entry, or that of the nearest path above it."""
    known: dict[str, str] = {}

    def precision(path: str) -> str:
        if path not in known:
            if path in scopes:
                known[path] = scopes[path].precision
            else:
                known[path] = precision(path.rpartition(".")[0]) if path else "fp32"
        return known[path]

    return precision
