"""Files laid out by line: the same data, no line without need, and a short object on each."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.document.codec import laid_out, one_a_line

PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=60)
TREES = st.recursive(PLAIN, lambda inside: st.lists(inside) | st.dictionaries(st.text(max_size=9), inside))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TREES)
def test_what_is_laid_out_is_the_same_data(tree: Any) -> None:
    assert json.loads(laid_out(tree)) == tree
    assert json.loads(one_a_line({"top": tree})) == {"top": tree}


def test_one_line_an_item_below_the_top() -> None:
    lines = one_a_line({"n": 1, "nodes": [{"a": 1, "b": [2]}, {"a": 2}], "plans": {"x": {"p": []}}}).splitlines()
    assert lines == [
        "{",
        ' "n": 1,',
        ' "nodes": [',
        '  {"a":1,"b":[2]},',
        '  {"a":2}',
        " ],",
        ' "plans": {',
        '  "x": {"p":[]}',
        " }",
        "}",
    ]
