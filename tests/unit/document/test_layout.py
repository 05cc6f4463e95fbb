"""Files laid out by line: the same data, no line without need, and a short object on each."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.capture.source import is_installed
from auditor.document.codec import laid_out
from auditor.document.places import from_repository, portable, portable_path
from auditor.document.reference import json_schema, main, objects, with_tables

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


# Files as seen from their repository, wherever that lies.


def test_a_file_is_seen_from_its_repository_or_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("repo/.git", "repo/models", "work"):
        (tmp_path / folder).mkdir(parents=True)
    for folder, file, said in (
        ("repo", "repo/models/net.py", "models/net.py"),
        (".", "repo/models/net.py", "models/net.py"),
        (".", "work/net.py", "work/net.py"),
        ("work", "net.py", "net.py"),
    ):
        monkeypatch.chdir(tmp_path / folder)
        assert from_repository(tmp_path / file) == said
    path = "/home/me/env/lib/python3.12/site-packages/timm/layers/mlp.py"
    assert portable_path(path) == "site-packages/timm/layers/mlp.py" == portable_path(portable_path(path))
    assert is_installed(path) and is_installed(portable_path(path))
    assert not is_installed("model.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/nowhere/at/all/net.py:build", "net.py:build"),
        ("net.py:build", "net.py:build"),
        ("sub/net.py:Net(width=8)", "sub/net.py:Net(width=8)"),
        ("--weights /nowhere/w.pt", "--weights w.pt"),
        ("hf:/nowhere/model", "hf:model"),
        ("hf:org/name@main", "hf:org/name@main"),
        ("https://example.org/a", "https://example.org/a"),
        ("~/net.py, ../net.py", "~/net.py, ../net.py"),
        ("random initialization, seed 0", "random initialization, seed 0"),
    ],
)
def test_a_text_keeps_no_absolute_path(text: str, said: str) -> None:
    assert portable(text) == said


# The generated parts of the documents: a schema that says what is written, and tables put where a page wants them.


def page(*names: str) -> str:
    return "\n".join(f"# {name}\n<!-- fields: {name} -->\nstale\n<!-- end of fields -->\nkept" for name in names)


def test_tables_are_written_afresh_and_the_rest_is_kept() -> None:
    names = list(objects())
    found = with_tables(page(*names))
    assert "stale" not in found
    assert found.count("\nkept") == len(names)
    assert "| `note` (measurements.json) | " in found
    assert with_tables(found) == found


def test_both_documents_are_written_where_they_are_told(root: Path, tmp_path: Path) -> None:
    text = (root / "docs" / "plan-json.md").read_text(encoding="utf-8")
    (tmp_path / "plan-json.md").write_text(text.replace("| `seed` | of every random choice |\n", ""), encoding="utf-8")
    main(tmp_path)
    assert (tmp_path / "plan-json.md").read_text(encoding="utf-8") == text
    for file, schema in (("plan.json", "plan.schema.json"), ("measurements.json", "measurements.schema.json")):
        assert (tmp_path / schema).read_text(encoding="utf-8") == json_schema(file)
