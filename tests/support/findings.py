"""Findings as tests make them by hand."""

from typing import Any

from auditor.records import Finding


def finding(rule: str, node: str, **about: Any) -> Finding:
    """A warning of a rule on an operation, empty but for what is said."""
    empty = dict.fromkeys(("name", "owner", "op", "message", "why", "advice"), "")
    usual = {"source": None, "severity": "warning", "confidence": "high", "formats": ("fp16", "bf16")}
    return Finding(**{"rule": rule, "node": node, **empty, **usual, **about})
