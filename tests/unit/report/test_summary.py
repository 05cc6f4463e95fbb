"""What Python shows of an audit: a few lines, true ones."""

from __future__ import annotations

import pytest

from tests.unit.report.factory import HOSTILE, make_audit


def test_it_is_the_verdict_in_a_few_lines() -> None:
    audit = make_audit(120)
    text = repr(audit)
    assert str(audit) == text
    assert len(text) < 800
    assert text.splitlines()[0] == f"Audit of TinyGPT, {len(audit.nodes)} operations"
    assert len(text.splitlines()) == 6  # one of them on the runs that turn Inf or NaN
    chosen = audit.plans["autocast_fp16"]
    assert f"{chosen.measured_error:.1e}".split("e")[0] in text


@pytest.mark.parametrize("kind", [{"empty": True}, {"recommended": None}, {"hostile": True, "synthetic": True}])
def test_every_audit_has_one(kind: dict) -> None:
    text = repr(make_audit(30, **kind) if "empty" not in kind else make_audit(**kind))
    assert text
    assert "\x1b" not in text
    assert HOSTILE not in text
