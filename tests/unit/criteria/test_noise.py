"""Three times what FP32 does by itself is no error, unless that would be everything."""

from __future__ import annotations

import math

from auditor.criteria.criterion import floor_of


def test_the_floor_is_three_times_the_noise_as_long_as_outputs_are_alike() -> None:
    assert floor_of(0.0, 0.0) == 0.0
    assert floor_of(0.02, 0.01) == 0.06
    assert floor_of(5.0, 0.3) == 15.0  # in the user's own measure
    assert floor_of(0.02, 0.34) == 0.0
    assert floor_of(math.inf, 0.0) == 0.0
