"""The nouns that flow from stage to stage; every record is frozen and holds data, not behaviour."""

from __future__ import annotations

from .audit import FORMAT_VERSION, Audit, Environment, NodeReport
from .dtypes import Dtypes
from .graph import (
    AutocastRegion,
    Batch,
    Call,
    Capture,
    Literals,
    ModelPath,
    Node,
    Objective,
    Origin,
    Placeholder,
    Progress,
    Subject,
)
from .measure import (
    Contribution,
    Distance,
    Finding,
    FlaggedRegion,
    Linearity,
    Magnitudes,
    NodeError,
    Noise,
    Verdict,
    Weight,
)
from .plan import CriterionValue, Memory, Plan, Reason, ScopeChoice, Verification
from .program import Kept, Onnx, Program
from .proposal import Proposal
from .run import NonFinite, Timed, Times, Timing, Today
from .score import Evaluation, Score
from .without import Baseline, RulesOnly

__all__ = [
    "FORMAT_VERSION",
    "Audit",
    "AutocastRegion",
    "Baseline",
    "Batch",
    "Call",
    "Capture",
    "Contribution",
    "CriterionValue",
    "Distance",
    "Dtypes",
    "Environment",
    "Evaluation",
    "Finding",
    "FlaggedRegion",
    "Kept",
    "Linearity",
    "Literals",
    "Magnitudes",
    "Memory",
    "ModelPath",
    "Node",
    "NodeError",
    "NodeReport",
    "Noise",
    "NonFinite",
    "Objective",
    "Onnx",
    "Origin",
    "Placeholder",
    "Plan",
    "Program",
    "Progress",
    "Proposal",
    "Reason",
    "RulesOnly",
    "ScopeChoice",
    "Score",
    "Subject",
    "Timed",
    "Times",
    "Timing",
    "Today",
    "Verdict",
    "Verification",
    "Weight",
]
