"""Which outputs a criterion speaks of."""

from __future__ import annotations

import pytest

from auditor.criteria import Criterion


@pytest.mark.parametrize(
    ("output", "name", "meant"),
    [
        ("boxes", "boxes", True),
        ("boxes", "boxes.0", True),
        ("boxes", "boxes2", False),
        ("boxes", "0.boxes", False),
        ("*.boxes", "0.boxes", True),
        ("0", "0", True),
        ("0", "10", False),
        ("*", "anything.at.all", True),
    ],
)
def test_names_prefixes_and_patterns(output: str, name: str, meant: bool) -> None:
    assert Criterion(output, "max_abs", 1.0).speaks_of(name) is meant
