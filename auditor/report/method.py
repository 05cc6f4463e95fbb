"""How an audit was made: from which inputs, weights and graph, on what, how long it took, and what limits it."""

from __future__ import annotations

from collections import Counter

from ..records.audit import Audit
from .blocks import Block, Code, Lines, Table
from .words import compact, count, op, ratio, scope

SHOWN = 12


def method(audit: Audit, limits: tuple[str, ...], proposals: tuple[str, ...]) -> list[Block]:
    """The section of the report. proposals: criteria that could be set."""
    env, subject, seconds = audit.environment, audit.subject, audit.seconds
    graph = {"run": "one recorded run", "path": "the path these inputs take"}.get(audit.capture_method, "")
    if any(report.node.batch != 1 for report in audit.nodes):
        graph = "a recorded run of each path that the batches take"
    runs = "formats run natively" if env.execution == "native" else "GPU arithmetic imitated on a CPU"
    spent = ", ".join(f"{stage} {time:.1f} s" for stage, time in seconds.items())
    rows = (
        ("Target", subject.target),
        ("Inputs", f"{subject.inputs_source}: {', '.join(audit.inputs) or 'none'}"),
        ("Weights", subject.weights_source),
        ("Graph", graph),
        ("Size", f"{compact(audit.parameters)} parameters, {count(len(audit.nodes), 'operation')}"),
        ("Execution", f"{env.device}, {runs}"),
        ("Measure", f"{audit.metric}, budget {audit.max_error:g}"),
        *noise(audit),
        ("Versions", f"auditor {env.auditor}, torch {env.torch}, seed {env.seed}"),
        ("Time", f"{sum(seconds.values()):.1f} s: {spent}" if seconds else "not recorded"),
        *((("Memory", env.held),) if env.held else ()),
    )
    none = "None known: real inputs, given weights, formats run natively, every operation tested."
    return [
        Table(("What", "How"), rows, texts=2, caption="Method"),
        Lines("Limits", limits or (none,), listed=True),
        *([Lines("Criteria that could be set", proposals, listed=True)] if proposals else []),
        Code("Reproduce", audit.command),
    ]


def noise(audit: Audit) -> tuple[tuple[str, str], ...]:
    """How far runs in FP32 are apart, and which operations make it so; nothing where it was not measured."""
    found = audit.noise
    if found is None or found.runs < 2:
        return ()
    runs = count(found.runs, "run")
    if not found.error and not found.nodes:
        return (("Noise", f"{runs} in FP32 gave the same outputs"),)
    outputs = sorted(found.outputs.items(), key=lambda pair: -pair[1])[:SHOWN]
    each = "; ".join(f"{name} {ratio(apart)}" for name, apart in outputs) if len(outputs) > 1 else ""
    below = f"; errors up to {ratio(found.floor)} are not called errors" if found.floor else ""
    said = ("Noise", f"{runs} in FP32 differ by {ratio(found.error)}{f' ({each})' if each else ''}{below}")
    if not found.operations:
        return (said,)
    known = {report.node.name: report.node for report in audit.nodes}
    times: Counter[str] = Counter()
    apart: dict[str, float] = {}
    for name in found.operations:
        node = known.get(name)
        at = f"{op(node.op)} in {scope(node.owner)}{f' ({node.source})' if node.source else ''}" if node else name
        times[at] += 1
        apart[at] = max(apart.get(at, 0.0), found.nodes.get(name, 0.0))
    listed = [f"{at}{f' ({n} times)' if n > 1 else ''}, off by {ratio(apart[at])}" for at, n in times.items()]
    more = [f"and {len(listed) - SHOWN} more, in measurements.json"] if len(listed) > SHOWN else []
    return (said, ("Not deterministic", "; ".join(listed[:SHOWN] + more)))
