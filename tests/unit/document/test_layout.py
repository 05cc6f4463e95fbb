"""Files laid out by line: the same data, no line without need, and a short object on each."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.document.codec import laid_out

PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=60)
TREES = st.recursive(PLAIN, lambda inside: st.lists(inside) | st.dictionaries(st.text(max_size=9), inside))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TREES)
def test_what_is_laid_out_is_the_same_data(tree: Any) -> None:
    assert json.loads(laid_out(tree)) == tree
    assert json.loads(laid_out(tree, 2)) == tree


def test_what_fits_or_lies_deep_stands_on_one_line() -> None:
    nodes = [{"a": number, "b": ["x" * 250] * number} for number in (1, 2)]
    head = ["{", ' "n": 1,', ' "nodes": [']
    assert laid_out({"n": 1, "nodes": nodes}, 2).splitlines() == [
        *head,
        f"  {json.dumps(nodes[0])},",
        f"  {json.dumps(nodes[1])}",
        " ]",
        "}",
    ]
    assert laid_out({"n": 1, "nodes": nodes}).splitlines()[:6] == [*head, "  {", '   "a": 1,', '   "b": [']
