"""What records of a graph say of themselves."""

from __future__ import annotations

import pytest

from auditor.records import Placeholder


@pytest.mark.parametrize(("holders", "expected"), [((), False), (("a",), False), (("a", "b"), True)])
def test_a_weight_that_several_modules_hold_is_tied(holders: tuple[str, ...], expected: bool) -> None:
    assert Placeholder("p_w", "parameter", "a.w", holders=holders).is_shared is expected
