"""A module that is imported while functions are replaced sees what it would see at any other time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from auditor.capture.importing import Importing

COMPILED_AFTERWARDS = """
import sys
import torch
from auditor.capture.regions import written_as_meant
from auditor.capture.asks import asking

own = torch.is_autocast_enabled
with written_as_meant(), asking(lambda: None):
    assert "torch._dynamo" not in sys.modules
    import torch._dynamo
    assert torch.is_autocast_enabled is not own
assert torch.is_autocast_enabled is own

def step(x):
    with torch.autocast("cpu", enabled=False):
        return x + 1 if torch.is_autocast_enabled("cpu") else x - 1

print(torch.compile(step, fullgraph=True, backend="eager")(torch.ones(2)).tolist())
"""


def test_a_compiler_imported_in_an_audit_compiles_afterwards(root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", COMPILED_AFTERWARDS], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[0.0, 0.0]\n"), done.stderr


def test_it_is_imported_inside_once_and_looks_as_it_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_one.py").write_text("import told\ntold.words.append('run')\n")
    (tmp_path / "told.py").write_text("words = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import told

    @contextmanager
    def around() -> Iterator[None]:
        told.words.append("begun")
        yield
        told.words.append("ended")

    hook = Importing("late_one", around)
    hook.begin()
    try:
        import late_one

        assert told.words == ["begun", "run", "ended"]
        assert late_one.__spec__.loader is late_one.__loader__
        assert type(late_one.__loader__).__name__ == "SourceFileLoader"
    finally:
        hook.end()
        for name in ("late_one", "told"):
            sys.modules.pop(name, None)
    assert hook not in sys.meta_path


def test_what_was_imported_before_is_left_alone() -> None:
    hook = Importing("os", lambda: pytest.fail("imported again"))
    hook.begin()
    assert hook not in sys.meta_path
