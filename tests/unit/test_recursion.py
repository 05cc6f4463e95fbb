"""How deep calls may nest, in the first thread and in others, and what is left of that afterwards."""

from __future__ import annotations

import resource
import sys
import threading

from auditor.recursion import ENOUGH, ENOUGH_IN_THREADS, MORE, STACK, deep


def test_the_limit_is_raised_once_and_comes_back() -> None:
    before, stack = sys.getrecursionlimit(), resource.getrlimit(resource.RLIMIT_STACK)
    with deep():
        raised = sys.getrecursionlimit()
        assert raised == min(MORE * before, ENOUGH)
        assert resource.getrlimit(resource.RLIMIT_STACK)[0] in (resource.RLIM_INFINITY, max(STACK, stack[0]))
        with deep():
            assert sys.getrecursionlimit() == raised
        assert sys.getrecursionlimit() == raised
        sys.setrecursionlimit(raised + 1)
    assert (sys.getrecursionlimit(), resource.getrlimit(resource.RLIMIT_STACK)) == (before, stack)


def test_a_model_that_sets_its_own_gets_more_than_that() -> None:
    before = sys.getrecursionlimit()
    with deep():
        sys.setrecursionlimit(8_000)
        with deep():
            assert sys.getrecursionlimit() == 16_000
        assert sys.getrecursionlimit() == 8_000
    assert sys.getrecursionlimit() == before


def test_less_where_the_stack_cannot_grow() -> None:
    found: list[int] = []

    def body() -> None:
        with deep():
            found.append(sys.getrecursionlimit())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [ENOUGH_IN_THREADS]
