"""How an audit was made, in rows: from which inputs, weights and graph, on what, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping

from ..records.audit import Audit
from .noise import noise_lines


def method_rows(audit: Audit) -> tuple[tuple[str, str], ...]:
    """What the report says of the method: (heading, text)."""
    env, subject = audit.environment, audit.subject
    native = env.execution == "native"
    graph = {"run": "one recorded run", "path": "the path these inputs take"}.get(audit.capture_method, "")
    if any(report.node.batch != 1 for report in audit.nodes):
        graph = "a recorded run of each path that the batches take"
    return (
        ("Target", subject.target),
        ("Inputs", f"{subject.inputs_source}: {', '.join(audit.inputs) or 'none'}"),
        ("Weights", subject.weights_source),
        ("Graph", graph),
        ("Execution", f"{env.device}, " + ("formats run natively" if native else "GPU arithmetic imitated on a CPU")),
        ("Measure", f"{audit.metric}, budget {audit.max_error:g}"),
        *noise_lines(audit),
        ("Versions", f"auditor {env.auditor}, torch {env.torch}, seed {env.seed}"),
        ("Time", _times(audit.seconds)),
        *((("Memory", env.held),) if env.held else ()),
    )


def _times(seconds: Mapping[str, float]) -> str:
    each = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in seconds.items())
    return f"{sum(seconds.values()):.1f} s: {each}" if each else "not recorded"
