"""Edited texts are imported in place of files, which stay as they are."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from auditor.features.fix.overlay import serve


def test_an_import_reads_the_edited_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "project_of_overlay"
    package.mkdir()
    (package / "__init__.py").write_text("")
    file = package / "parts.py"
    file.write_text("def size():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with serve({str(file): "def size():\n    return 2  # edited\n"}):
        module = importlib.import_module("project_of_overlay.parts")
        assert module.size() == 2
        assert "# edited" in inspect.getsource(module.size)
    for name in ("project_of_overlay.parts", "project_of_overlay"):
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module("project_of_overlay.parts").size() == 1
    assert file.read_text() == "def size():\n    return 1\n"
    assert not list(package.glob("__pycache__/parts*")) or sys.dont_write_bytecode is False
