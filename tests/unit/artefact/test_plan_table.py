"""A plan as the plain data that the runtime reads."""

from __future__ import annotations

from auditor.artefact.base import plan_table
from auditor.records import Plan, ScopeChoice


def test_scopes_by_path() -> None:
    scopes = {"": ScopeChoice("fp16"), "head": ScopeChoice("fp32", ("NRM001",), "keep")}
    assert plan_table(Plan("cast_fp16", "cast", "fp16", scopes, 0.1, 1.0, 0.5)) == {
        "strategy": "cast",
        "format": "fp16",
        "raised": "none",
        "stored_low": {},
        "scopes": {
            "": {"precision": "fp16", "because": [], "output": "cast"},
            "head": {"precision": "fp32", "because": ["NRM001"], "output": "keep"},
        },
    }
