"""How sparing an audit is holds for a body, and for all that it calls."""

from __future__ import annotations

import threading

import pytest

from auditor.sparing import Sparing, now, sparing


def test_it_holds_for_the_body_in_other_threads_too() -> None:
    seen: list[Sparing] = []
    how = Sparing(run=4, host=True)
    with sparing(how):
        thread = threading.Thread(target=lambda: seen.append(now()))
        thread.start()
        thread.join()
    assert seen == [how] and now() == Sparing()


def test_it_ends_where_the_body_raises() -> None:
    with pytest.raises(ValueError, match="full"), sparing(Sparing(singly=True)):
        raise ValueError("full")
    assert now() == Sparing()
