"""The innermost module of a region, whatever characters its name has."""

import pytest

from auditor.measure.rerun import _innermost


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["a.b.c", "a.b.d"], "a.b"),
        (["a.b", "a.b.c"], "a.b"),
        (["/conv1/Conv", "/conv2/Conv"], ""),
        (["net./conv1/Conv", "net.relu"], "net"),
        (["", "a"], ""),
    ],
)
def test_the_innermost_module(modules, expected):
    assert _innermost(modules) == expected
