"""The corpus itself: cases fail when they are cast, twins and traps do not."""

from __future__ import annotations

import pytest

from auditor.numerics.metrics import output_error
from tests.corpus.case import Build, Case, Trap
from tests.corpus.catalogue import CASES, plainly
from tests.corpus.traps import TRAPS

ROWS = [pytest.param(case, fmt, id=f"{case.name}-{fmt}") for case in CASES for fmt in case.formats]
TRAP_ROWS = [pytest.param(trap, fmt, id=f"{trap.name}-{fmt}") for trap in TRAPS for fmt in trap.formats]


def test_every_case_is_here_once() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) == 42
    assert sum(case.mode == "train" for case in CASES) == 2


def holds(case: Case, build: Build, fmt: str) -> bool:
    """Whether the model, cast as a whole, stays within the case's tolerance; raising does not count as that."""
    model, inputs = build()
    reference = plainly(model, inputs, "fp32", case.mode)
    try:
        low = plainly(model, inputs, fmt, case.mode)
    except (RuntimeError, NotImplementedError):
        return False
    return case.distance(reference, low) <= case.tolerance


@pytest.mark.parametrize(("case", "fmt"), ROWS)
def test_it_fails_and_its_twin_does_not(case: Case, fmt: str) -> None:
    assert not holds(case, case.build, fmt)
    assert holds(case, case.twin, fmt)


@pytest.mark.parametrize(("trap", "fmt"), TRAP_ROWS)
def test_the_trap_is_harmless(trap: Trap, fmt: str) -> None:
    model, inputs = trap.build()
    assert output_error(plainly(model, inputs, "fp32"), plainly(model, inputs, fmt)) <= trap.tolerance
