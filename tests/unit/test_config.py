"""`[tool.auditor]`: where it is looked for and what it may say."""

from __future__ import annotations

import pytest

from auditor.config import Ignore, Selection, read, selection
from auditor.criteria import criteria_of
from auditor.errors import AuditorError

KNOWN = {"formats", "max_error", "out", "rules"}


def test_nearest_table_counts(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.auditor]\nmax-error = 0.5\nformats = ["fp16", "bf16"]\n')
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert read(inner, KNOWN) == {"max_error": "0.5", "formats": "fp16,bf16"}
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.auditor]\nmax-error = 2\n")
    assert read(inner, KNOWN) == {"max_error": "2"}


def test_criteria_in_a_list_are_read_one_by_one(tmp_path):
    written = 'criterion = ["logits: topk(5, dim=1) >= 0.9", "boxes: max_abs <= 0.5"]'
    (tmp_path / "pyproject.toml").write_text(f"[tool.auditor]\n{written}\n")
    given = read(tmp_path, KNOWN | {"criterion"})["criterion"]
    assert [str(one) for one in criteria_of([given])] == ["logits: topk(5, dim=1) >= 0.9", "boxes: max_abs <= 0.5"]


def test_paths_count_from_the_file(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.auditor]\nout = "reports"\n')
    (tmp_path / "deep").mkdir()
    assert read(tmp_path / "deep", KNOWN) == {"out": str(tmp_path / "reports")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.auditor]\nmax-eror = 1\n", "did you mean max-error?"),
        ("[tool.auditor]\nzzz = 1\n", "known: formats"),
        ("[tool.auditor]\nper-module-ignore = []\n", "did you mean per-module-ignores?"),
        ("[tool.auditor]\nformats = {a = 1}\n", "plain value"),
        ("[tool.auditor\n", "pyproject.toml"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(AuditorError, match=r"pyproject\.toml") as caught:
        read(tmp_path, KNOWN)
    assert words in str(caught.value)
    assert caught.value.slug == "bad-config"


CHOICES = """[tool.auditor]
max-error = 0.5
select = ["NRM", "SFT001"]
ignore = ["NRM004"]

[[tool.auditor.per-module-ignores]]
module = "blocks.*.norm"
code = "NRM001"
reason = "its input is normalised before"
"""


def test_a_selection_names_codes_modules_reasons_and_lines(tmp_path):
    (tmp_path / "pyproject.toml").write_text(CHOICES)
    (tmp_path / "deep").mkdir()
    assert selection(tmp_path / "deep") == Selection(
        select=("NRM", "SFT001"),
        ignores=(
            Ignore("NRM004", source="pyproject.toml:4"),
            Ignore("NRM001", "blocks.*.norm", "its input is normalised before", "pyproject.toml:7"),
        ),
    )
    assert read(tmp_path, KNOWN) == {"max_error": "0.5"}


def test_no_table_selects_everything(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.auditor]\n")
    assert selection(tmp_path) == Selection()


ENTRY = '[[tool.auditor.per-module-ignores]]\nmodule = "a"\ncode = "NRM001"\nreason = "b"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[tool.auditor]\nselect = "NRM"\n', "select must be a list of codes"),
        ('[tool.auditor]\nignore = ["norms"]\n', "'norms' is neither a code"),
        ("[tool.auditor]\nper-module-ignores = 3\n", "must be a list of tables"),
        (ENTRY.replace('reason = "b"\n', ""), "'reason'"),
        (ENTRY.replace('"b"', '" "'), "'reason'"),
        (ENTRY.replace('"a"', "1"), "'module'"),
        (ENTRY.replace('"NRM001"', '"N1"'), "'N1' is neither a code"),
        (ENTRY + "since = 3\n", "'since'"),
    ],
)
def test_mistakes_in_a_selection_are_named(tmp_path, text, words):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(AuditorError, match=r"pyproject\.toml") as caught:
        selection(tmp_path)
    assert words in str(caught.value)
    assert caught.value.slug == "bad-config"
