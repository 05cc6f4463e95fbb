"""How deep calls may nest, and what is left of that afterwards."""

from __future__ import annotations

import sys

from auditor.recursion import ENOUGH, deep


def test_the_limit_is_raised_and_comes_back() -> None:
    before = sys.getrecursionlimit()
    with deep():
        assert sys.getrecursionlimit() == ENOUGH
        sys.setrecursionlimit(ENOUGH + 1)
        with deep():
            assert sys.getrecursionlimit() == ENOUGH + 1
    assert sys.getrecursionlimit() == before
