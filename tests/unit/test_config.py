"""`[tool.auditor]`: where it is looked for and what it may say."""

from __future__ import annotations

import pytest

from auditor.config import read
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


def test_paths_count_from_the_file(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.auditor]\nout = "reports"\n')
    (tmp_path / "deep").mkdir()
    assert read(tmp_path / "deep", KNOWN) == {"out": str(tmp_path / "reports")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.auditor]\nmax-eror = 1\n", "did you mean max-error?"),
        ("[tool.auditor]\nzzz = 1\n", "known: formats"),
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
