"""Beats are heard by who listens, the innermost of them, and by nobody else."""

from __future__ import annotations

import pytest

from auditor.stages import beat, listening


def test_the_innermost_listener_hears_them() -> None:
    outer: list[str] = []
    inner: list[str] = []
    beat("before")
    with listening(outer.append):
        beat("first")
        with listening(inner.append):
            beat("second")
        beat()
    beat("after")
    assert (outer, inner) == (["first", ""], ["second"])


def test_who_raises_listens_no_more() -> None:
    heard: list[str] = []
    with pytest.raises(ValueError, match="stop"), listening(heard.append):
        raise ValueError("stop")
    beat("after")
    assert heard == []
