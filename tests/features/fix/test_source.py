"""Edits compose, keep what they do not touch, and become a patch."""

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest

from auditor.features.fix.source import (
    BOM,
    Edit,
    Source,
    base_of,
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


def test_python_gives_these_places_itself() -> None:
    """The span of a call whose method stands on a later line, as the interpreter reports it."""
    text = "def forward(x):\n    return (x\n        .strip()\n        .missing())\n"
    source = Source("m.py", text)
    space: dict[str, Any] = {}
    exec(compile(text, "m.py", "exec"), space)
    places = {tuple(place) for place in space["forward"].__code__.co_positions() if None not in place}
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    found = []
    for line, end_line, column, end_column in places:
        found.append(source.expression_at(Span("m.py", line, column, end_line, end_column)))
    assert set(calls) <= set(found)


def test_lines_keep_their_ends_and_their_indentation() -> None:
    text = "def step():\r\n\tunscale()\r\n\tclip(); step()\r\n"
    source = Source("m.py", text)
    unscale, clip, step = source.tree.body[0].body  # type: ignore[attr-defined]
    assert source.apply([source.line_insertion(unscale, "zero()")]).splitlines(keepends=True)[1] == "\tzero()\r\n"
    assert source.apply([source.line_insertion(unscale, "zero()", below=True)]) == (
        "def step():\r\n\tunscale()\r\n\tzero()\r\n\tclip(); step()\r\n"
    )
    assert source.apply([source.line_insertion(clip, "zero()", below=True)]).endswith("\tclip(); zero(); step()\r\n")
    assert source.apply(source.deletion(clip)).endswith("\tpass; step()\r\n")
    assert source.apply(source.deletion(step)).endswith("\tclip(); pass\r\n")
    assert source.apply(source.deletion(unscale)) == "def step():\r\n\tclip(); step()\r\n"


def test_a_line_below_the_last_one_of_a_file_that_ends_without_a_line_end() -> None:
    source = Source("m.py", "def step():\n    one()\n    two()")
    last = source.tree.body[0].body[-1]  # type: ignore[attr-defined]
    assert source.apply([source.line_insertion(last, "three()", below=True)]).endswith("\n    two()\n    three()")


def test_a_byte_order_mark_stays(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(BOM + "x = [1].copy()\n")
    source = Source.read(str(file))
    node = only(source, "[1].copy()")
    assert source.segment(node) == "[1].copy()"
    assert source.apply(source.after(node, ".pop()")) == BOM + "x = [1].copy().pop()\n"


def test_a_file_in_another_encoding_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("# -*- coding: latin-1 -*-\nx = 'é'\n")  # as UTF-8: Python reads other characters
    with pytest.raises(ValueError, match="iso-8859-1"):
        Source.read(str(file))


def test_expressions_in_formatted_strings_have_no_place() -> None:
    source = Source("m.py", 'def forward(x):\n    return f"{x.exp()}", x.exp()\n')
    strings = [node for node in ast.walk(source.tree) if isinstance(node, ast.JoinedStr)]
    assert all(source.is_formatted(node) for node in ast.walk(strings[0]))
    assert not source.is_formatted(source.tree.body[0])


def test_files_of_one_name_outside_a_repository_have_different_names_in_a_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sources: dict[str, Source] = {}
    for name in ("left", "right side"):
        file = tmp_path / "project" / name / "ops.py"
        file.parent.mkdir(parents=True)
        file.write_text(TEXT)
        sources[str(file)] = Source.read(str(file))
    edits = [edit for source in sources.values() for edit in source.after(only(source, "x.exp()"), ".float()")]
    patch = unified_diff(sources, edits)
    assert base_of(sources) == tmp_path / "project"
    for command in (["git", "apply", "-"], ["patch", "-p1", "-R"]):
        subprocess.run(command, cwd=tmp_path / "project", check=True, text=True, input=patch)
        files = [Path(file).read_text() for file in sources]
        is_fixed = command[0] == "git"
        assert files == [TEXT.replace("x.exp()", "x.exp().float()") if is_fixed else TEXT] * 2
