"""How far FP32 is from itself, in words, and which operations are not deterministic."""

from __future__ import annotations

from collections import Counter

from ..records.audit import Audit
from .words import count, op, ratio, scope

SHOWN = 12


def noise_lines(audit: Audit) -> tuple[tuple[str, str], ...]:
    """Labelled lines of how the audit was done; none where nothing is known."""
    noise = audit.noise
    if noise is None or noise.runs < 2:
        return ()
    runs = count(noise.runs, "run")
    if not noise.error and not noise.nodes:
        return (("Noise", f"{runs} in FP32 gave the same outputs"),)
    outputs = sorted(noise.outputs.items(), key=lambda pair: -pair[1])[:SHOWN]
    each = "; ".join(f"{name} {ratio(apart)}" for name, apart in outputs) if len(outputs) > 1 else ""
    below = f"; errors up to {ratio(noise.floor)} are not called errors" if noise.floor else ""
    said = [("Noise", f"{runs} in FP32 differ by {ratio(noise.error)}{f' ({each})' if each else ''}{below}")]
    if noise.operations:
        said.append(("Not deterministic", _operations(audit)))
    return tuple(said)


def _operations(audit: Audit) -> str:
    """Every operation that makes other results of the same inputs, by module and line, and how far results were apart."""
    assert audit.noise is not None
    known = {report.node.name: report.node for report in audit.nodes}
    found: Counter[str] = Counter()
    apart: dict[str, float] = {}
    for name in audit.noise.operations:
        node = known.get(name)
        where = f"{op(node.op)} in {scope(node.owner)}{f' ({node.source})' if node.source else ''}" if node else name
        found[where] += 1
        apart[where] = max(apart.get(where, 0.0), audit.noise.nodes.get(name, 0.0))
    listed = [f"{where}{f' ({n} times)' if n > 1 else ''}, off by {ratio(apart[where])}" for where, n in found.items()]
    more = f"; and {len(listed) - SHOWN} more, in measurements.json" if len(listed) > SHOWN else ""
    return "; ".join(listed[:SHOWN]) + more
