"""Errors the user meets: one root, a slug each, and the first line of what others say."""

from __future__ import annotations

import pickle

import pytest

from auditor import errors
from auditor.numerics.kernels import UnsupportedInFormat


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("\n first \nsecond"), "first "), (KeyError(), "KeyError"), (RuntimeError("  "), "RuntimeError")],
)
def test_the_first_line_of_an_error(error: Exception, expected: str) -> None:
    assert errors.first_line(error) == expected


def test_errors_go_from_one_process_to_another() -> None:
    for error in (errors.AuditorError("no", "bad-option"), UnsupportedInFormat("no kernel", "layer")):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
