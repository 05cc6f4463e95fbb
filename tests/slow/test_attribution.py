"""First-order attribution against brute force, and flips that margins predict against flips that are counted;
`python -m benchmarks.attribution` and `python -m benchmarks.flips` print the figures."""

import pytest

from benchmarks import flips
from benchmarks.attribution import LARGE, MODELS, compare, whole_plans
from tests.support.subjects import FORMATS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", MODELS | LARGE)
def test_against_brute_force(name: str, fmt: str) -> None:
    found = compare(name, fmt, every=4 if name == "convnext_tiny" else 1)
    low, median, high = found.ratios
    # What is left out must be small, and must have been predicted to be.
    assert all(error <= 4 * found.floor for error in found.left_out.values())
    assert len(found.true) >= 30
    assert found.rho >= 0.97
    assert 0.9 <= median <= 1.1
    assert low >= 0.4
    assert high <= 2.5


@pytest.mark.parametrize("name", MODELS | LARGE)
def test_the_whole_plan(name: str) -> None:
    ratios = dict(whole_plans(name))
    assert ratios
    assert {plan: ratio for plan, ratio in ratios.items() if not 1 / 1.5 <= ratio <= 1.5} == {}


@pytest.mark.parametrize("name", flips.MODELS)
def test_as_many_flip_as_are_predicted(name: str) -> None:
    for one in flips.count_flips(name):
        assert one.counted >= 20, one
        assert 1 / 1.5 <= one.predicted / one.counted <= 1.5, one
