"""Edits compose, keep what they do not touch, and become a patch."""

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest

from auditor.features.fix.source import (
    Edit,
    Source,
    clash,
    edited_texts,
    expression_before,
    original_offset,
    unified_diff,
)
from auditor.records import Span

TEXT = """def forward(x, y):
    é = x.exp()  # a comment stays
    z = (é + y) / 2
    return z
"""


def only(source: Source, text: str) -> ast.expr:
    """The expression with a text."""
    found = [one for one in ast.walk(source.tree) if isinstance(one, ast.expr) and ast.unparse(one) == text]
    return found[0]


def test_offsets_are_in_bytes() -> None:
    source = Source("m.py", TEXT)
    node = only(source, "é + y")
    assert source.segment(node) == "é + y"
    assert source.place_of_offset(source.bounds(node)[1]) == (3, 15)
    assert source.offset_of(3, 15) == source.bounds(node)[1]


def test_edits_at_one_place_compose_and_comments_stay() -> None:
    source = Source("m.py", TEXT)
    inner, outer = only(source, "x"), only(source, "(é + y) / 2")
    edits = (*source.after(inner, ".float()"), *source.after(outer, ".to(x.dtype)"), *source.after(inner, ".float()"))
    assert source.apply(edits).splitlines()[1:3] == [
        "    é = x.float().exp()  # a comment stays",
        "    z = ((é + y) / 2).to(x.dtype)",
    ]


def test_two_casts_of_one_value_clash_and_equal_edits_do_not() -> None:
    one, other = Edit("m.py", 5, 5, ".float()"), Edit("m.py", 5, 5, ".to(x.dtype)")
    assert clash((one,), (other,))
    assert not clash((one,), (one,))
    assert not clash((one,), (Edit("n.py", 5, 5, ".to(x.dtype)"),))
    assert clash((Edit("m.py", 3, 9, "y"),), (one,))
    with pytest.raises(ValueError, match="same text"):
        Source("m.py", TEXT).apply((one, other))


def test_the_expression_of_a_place_is_found_again_after_edits() -> None:
    source = Source("m.py", TEXT)
    used = next(ast.iter_child_nodes(only(source, "é + y")))
    assert isinstance(used, ast.Name)
    edits = (*source.after(only(source, "x"), ".float()"), *source.after(used, ".to(y.dtype)"))
    edited = Source("m.py", source.apply(edits))
    node = only(edited, "é.to(y.dtype) + y")
    span = Span("m.py", node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
    found = expression_before(source, edits, span)
    assert found is not None
    assert ast.unparse(found) == "é + y"
    assert original_offset(0, edits) == 0


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_diff_is_a_patch(tmp_path: Path, end: str) -> None:
    file = tmp_path / "m.py"
    file.write_text(TEXT.rstrip("\n") + end)
    source = Source.read(str(file))
    edits = source.after(only(source, "z"), ".float()")
    patch = unified_diff({str(file): source}, edits).replace("a/m.py", "a/m.py")
    (after,) = edited_texts({str(file): source}, edits).values()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    given: dict[str, Any] = {"cwd": tmp_path, "check": True, "text": True, "input": patch}
    subprocess.run(["git", "apply", "-"], **given)
    assert file.read_text() == after
