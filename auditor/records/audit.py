"""What an audit comes to: the record that every reporter reads and `plan.json` stores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .graph import Node, Subject
from .measure import Contribution, Finding, FlaggedRegion, Magnitudes, NodeError, Verdict, Weight
from .plan import Baseline, Plan
from .training import Training

FORMAT_VERSION = 1
"""Version of plan.json; raised when a field changes its meaning or goes."""


@dataclass(frozen=True)
class Environment:
    """Where the numbers come from. execution: "native" (a GPU ran the formats) or "emulated" (a CPU imitated one)."""

    auditor: str
    torch: str
    device: str
    execution: str
    seed: int


@dataclass(frozen=True)
class NodeReport:
    """Everything known about one node, formats keyed by name."""

    node: Node
    findings: tuple[str, ...]
    errors: Mapping[str, NodeError]
    contributions: Mapping[str, Contribution]
    verdicts: Mapping[str, Verdict]
    exposed: Mapping[str, tuple[str, ...]]
    range: Magnitudes | None
    flops: int


@dataclass(frozen=True)
class Audit:
    """Everything an audit found; what every reporter reads and `plan.json` stores.

    plan_errors: relative L2 error of each node's output in a run of the graph under the recommended plan.
    """

    subject: Subject
    parameters: int
    inputs: tuple[str, ...]
    environment: Environment
    formats: tuple[str, ...]
    max_error: float
    metric: str
    capture_method: str
    nodes: tuple[NodeReport, ...]
    findings: tuple[Finding, ...]
    plans: Mapping[str, Plan]
    baselines: Mapping[str, Baseline]
    recommended: str | None
    recommendation: str
    seconds: Mapping[str, float]
    warnings: tuple[str, ...]
    command: str
    plan_errors: Mapping[str, float] = field(default_factory=dict)
    weights: tuple[Weight, ...] = ()
    regions: tuple[FlaggedRegion, ...] = ()
    training: Training | None = None

    def to_json(self) -> dict[str, Any]:
        """What `plan.json` holds."""
        from ..document.serialise import to_document

        return to_document(self)

    def save(self, directory: str | Path) -> tuple[Path, ...]:
        """Write report.html, plan.json, patched_model.py and findings.sarif; returns their paths."""
        from ..patch.emit import emit
        from ..report.reporters import files

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            "plan.json": json.dumps(self.to_json(), indent=1) + "\n",
            "patched_model.py": emit(self.subject.origin, self.parameters, self.plans, self.recommended, folder),
            **files(self),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return tuple(folder / name for name in texts)

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        from ..report import notebook

        return notebook.render(self)
