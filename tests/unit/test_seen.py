"""Which tests see a GPU: on a machine that has one, those of the imitation must run as anywhere."""

from __future__ import annotations

import pytest

from tests.conftest import sees_a_gpu


@pytest.mark.parametrize(
    ("markers", "seen"),
    [
        ("", False),
        ("not slow", False),
        ("gpu", True),
        ("slow or gpu", True),
        ("not gpu", False),
        ("slow and not gpu", False),
    ],
)
def test_a_gpu_is_seen_where_it_is_asked_for(markers: str, seen: bool) -> None:
    assert sees_a_gpu(markers) == seen
