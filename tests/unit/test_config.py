"""`[tool.auditor]`: where it is looked for and what it may say."""

from __future__ import annotations

import pytest

from auditor.asked import Command, command_of, configuration
from auditor.config import Ignore
from auditor.criteria import criteria_of
from auditor.errors import AuditorError


def read(folder):
    return configuration(folder)[1]


@pytest.fixture
def selection(monkeypatch):
    def selected(folder):
        monkeypatch.chdir(folder)
        return command_of({}, Command)

    return selected


def test_nearest_table_counts(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.auditor]\nmax-error = 0.5\nformats = ["fp16", "bf16"]\n')
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert read(inner) == {"max_error": 0.5, "formats": ["fp16", "bf16"]}
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.auditor]\nout = 'reports'\n")
    assert read(inner) == {"out": str(tmp_path / "a" / "reports")}


def test_criteria_in_a_list_are_read_one_by_one(tmp_path):
    written = 'criterion = ["logits: topk(5, dim=1) >= 0.9", "boxes: max_abs <= 0.5"]'
    (tmp_path / "pyproject.toml").write_text(f"[tool.auditor]\n{written}\n")
    given = read(tmp_path)["criteria"]
    assert [str(one) for one in criteria_of(given)] == ["logits: topk(5, dim=1) >= 0.9", "boxes: max_abs <= 0.5"]


ENTRY = '[[tool.auditor.per-module-ignores]]\nmodule = "a"\ncode = "NRM001"\nreason = "b"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.auditor]\nmax-eror = 1\n", "did you mean max-error?"),
        ("[tool.auditor]\nzzz = 1\n", "known: formats"),
        ("[tool.auditor]\nquick = 'yes'\n", "[tool.auditor] quick takes True or False, not 'yes'"),
        ("[tool.auditor]\nno-quick = true\n", "did you mean quick?"),
        ("[tool.auditor]\nmax-error = -1\n", "max-error takes a positive number, not -1"),
        ("[tool.auditor]\nper-module-ignore = []\n", "did you mean per-module-ignores?"),
        ("[tool.auditor]\nformats = {a = 1}\n", "formats takes fp16, bf16"),
        ("[tool.auditor\n", "pyproject.toml"),
        ("[tool.auditor]\nselect = 3\n", "select takes codes"),
        (
            '[tool.auditor]\nignore = ["norms"]\n',
            "ignore takes codes such as NRM001, or the letters of a family, not 'norms'",
        ),
        ("[tool.auditor]\nper-module-ignores = 3\n", "takes a list of tables: module, code and reason"),
        (ENTRY.replace('reason = "b"\n', ""), "reason"),
        (ENTRY.replace('"b"', '" "'), "reason"),
        (ENTRY.replace('"a"', "1"), "module"),
        (ENTRY.replace('"NRM001"', '"N1"'), "not 'N1'"),
        (ENTRY + "since = 3\n", "not 3"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words, selection):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(AuditorError, match=r"pyproject\.toml") as caught:
        selection(tmp_path)
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


def test_a_selection_names_codes_modules_reasons_and_lines(tmp_path, selection):
    (tmp_path / "pyproject.toml").write_text(CHOICES)
    (tmp_path / "deep").mkdir()
    found = selection(tmp_path / "deep")
    assert found.select == ("NRM", "SFT001")
    assert found.ignores == (
        Ignore("NRM004", source="pyproject.toml:4"),
        Ignore("NRM001", "blocks.*.norm", "its input is normalised before", "pyproject.toml:7"),
    )
    assert command_of({}, Command).max_error == 0.5
    assert command_of({"ignore": "SFT"}, Command).ignores[0] == Ignore("SFT")


def test_flags_are_true_or_false_and_the_command_line_wins(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.auditor]\nquick = true\nmeasure-time = false\n")
    monkeypatch.chdir(tmp_path)
    assert (command_of({}, Command).quick, command_of({}, Command).measure_time) == (True, False)
    assert command_of({"quick": False}, Command).quick is False
