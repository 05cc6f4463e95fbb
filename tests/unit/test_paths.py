"""Paths of modules: what is nearest above, and what lies in what."""

from __future__ import annotations

import pytest

from auditor.paths import nearest, nearest_above, place, within

KNOWN = {"", "a.b", "a.b.c.d"}


@pytest.mark.parametrize(
    ("path", "own", "above"),
    [
        ("", "", None),
        ("a", "", ""),
        ("a.b", "a.b", ""),
        ("a.bc", "", ""),
        ("a.b.c", "a.b", "a.b"),
        ("a.b.c.d", "a.b.c.d", "a.b"),
        ("a.b.c.d.e", "a.b.c.d", "a.b.c.d"),
    ],
)
def test_nearest(path: str, own: str, above: str | None) -> None:
    assert (nearest(path, KNOWN), nearest_above(path, KNOWN)) == (own, above)


def test_a_prefix_of_a_name_is_no_scope() -> None:
    assert within("a.b", "a")
    assert within("a", "a")
    assert within("a", "")
    assert not within("ab", "a")


def test_a_place_is_the_line_and_the_operation_or_the_modules_that_repeat_it() -> None:
    assert place("model.py:3", "blocks.3.mlp", "aten.mul.Tensor") == "model.py:3 mul"
    assert place(None, "blocks.3.mlp", "getitem") == "blocks.*.mlp getitem"
