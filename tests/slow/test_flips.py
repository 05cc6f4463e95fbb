"""Flips that margins predict against flips that are counted; `python -m benchmarks.flips` prints them."""

import pytest

from benchmarks.flips import MODELS, count_flips

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MODELS)
def test_as_many_flip_as_are_predicted(name: str) -> None:
    for one in count_flips(name):
        assert one.counted >= 20, one
        assert 1 / 1.5 <= one.predicted / one.counted <= 1.5, one
