"""A score holds where there is one and nothing says that it is too low."""

from __future__ import annotations

import pytest

from auditor.records import Plan, ScopeChoice, Score


@pytest.mark.parametrize(
    ("score", "holds"),
    [
        (Score(0.9, -0.1, None, True), True),
        (Score(0.9, -0.1, None, None), True),
        (Score(0.9, -0.1, None, False), False),
        (Score(None, failure="it raised"), False),
        (Score(None, passed=False, failure="it raised"), False),
        (None, True),
    ],
)
def test_what_holds(score: Score | None, holds: bool) -> None:
    assert score is None or score.holds is holds
    for verified in (True, False):
        plan = Plan(
            "cast_bf16", "cast", "bf16", {"": ScopeChoice("bf16")}, 0.0, 1.0, 1.0, verified=verified, score=score
        )
        assert plan.holds is (verified and holds)
