"""Compiled templates are taken only where they are what would be compiled; a page is the same with them and without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader

from auditor.report.compiled import Compiled
from auditor.report.templates import OPTIONS, environment

PAGE = "page.html.jinja"


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / PAGE).write_text("{{ text }}!\n")


def rendered(folder: Path, **other: Any) -> tuple[str, bool]:
    """The page, and whether it was compiled for it."""
    options = {**OPTIONS, **other}
    made = Environment(loader=FileSystemLoader(folder), bytecode_cache=Compiled(folder, options), **options)
    compiled: list[Any] = []
    generate = made._generate
    made._generate = lambda *args, **kwargs: compiled.append(args) or generate(*args, **kwargs)  # type: ignore[method-assign]
    return made.get_template(PAGE).render(text="<b>"), bool(compiled)


def kept(folder: Path) -> list[Path]:
    return list((folder / "__pycache__").glob("*"))


def test_a_template_is_compiled_once(tmp_path: Path) -> None:
    assert [rendered(tmp_path) for _ in range(2)] == [("&lt;b&gt;!\n", True), ("&lt;b&gt;!\n", False)]
    (file,) = kept(tmp_path)
    assert file.suffix == ".pyc"


def test_another_text_or_option_is_compiled(tmp_path: Path) -> None:
    rendered(tmp_path)
    assert rendered(tmp_path, autoescape=False) == ("<b>!\n", True)
    (tmp_path / PAGE).write_text("{{ text }}?\n")
    assert rendered(tmp_path) == ("&lt;b&gt;?\n", True)


def test_another_jinja_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered(tmp_path)
    monkeypatch.setattr("jinja2.__version__", "0")
    assert rendered(tmp_path)[1]


@pytest.mark.parametrize("length", [0, 3, 40, -1])
def test_what_is_not_whole_is_passed_over(length: int, tmp_path: Path) -> None:
    rendered(tmp_path)
    (file,) = kept(tmp_path)
    file.write_bytes(file.read_bytes()[:length])
    assert rendered(tmp_path) == ("&lt;b&gt;!\n", True)


def test_nothing_is_written_where_python_writes_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rendered(tmp_path)[1]
    assert not kept(tmp_path)


def test_a_place_that_takes_no_file_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").write_text("")
    assert [rendered(tmp_path) for _ in range(2)] == [("&lt;b&gt;!\n", True)] * 2


def test_the_pages_of_the_package_are_made_so() -> None:
    assert isinstance(environment().bytecode_cache, Compiled)
