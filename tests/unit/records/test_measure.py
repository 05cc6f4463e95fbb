"""What records of a measurement say of themselves."""

from __future__ import annotations

import pytest

from auditor.records import Magnitudes


@pytest.mark.parametrize(
    ("found", "nonzero", "share"),
    [
        (Magnitudes(4.0, 1.0, 2, {0: 5, 2: 1}), 6, 0.25),
        (Magnitudes(0.0, 0.0, 3, {}), 0, 1.0),
        (Magnitudes(0.0, 0.0, 0, {}), 0, 0.0),
        (Magnitudes(4.0, 4.0, 1, {2: 1}, nonfinite=8), 1, 0.5),  # of the finite ones
    ],
)
def test_zeros_among_finite_entries(found: Magnitudes, nonzero: int, share: float) -> None:
    assert (found.nonzero, found.zero_share) == (nonzero, share)
