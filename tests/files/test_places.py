"""Odd places to run from: what lies there, or cannot lie there, ends in an audit or in one line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODEL = "import torch\nmodel = torch.nn.Linear(2, 2)\ndef get_inputs(): return torch.ones(1, 2)\n"


def ended(folder: Path, root: Path, *words: str) -> tuple[int, str]:
    (folder / "model.py").write_text(MODEL)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


<<<<<<< HEAD
=======
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("json.py", "raise RuntimeError('not the one')", "RuntimeError: not the one"),
        ("torch.py", "", "'torch' is not a package"),
        ("numpy/__init__.py", "raise OSError('nor this')", "OSError: nor this"),
    ],
)
def test_a_file_that_hides_a_package_is_named(name: str, text: str, said: str, tmp_path: Path, root: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    code, errors = ended(tmp_path, root, "-m", "auditor", "model.py", "-q")
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert f"'{name.partition('.')[0].partition('/')[0]}' in the working directory was imported in place" in line
    assert said in line
    assert "Traceback" not in errors


def test_a_file_that_hides_nothing_is_not_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("")
    error = RuntimeError("of another make")
    error.__cause__ = error
    assert hiding(error) is None


>>>>>>> 779f8f4 (Tests select findings by the settings)
def test_no_temporary_directory_is_one_line(tmp_path: Path, root: Path) -> None:
    nowhere = "import tempfile, sys; tempfile._candidate_tempdir_list = lambda: ['/nowhere/at/all']"
    run = f"{nowhere}; sys.argv = ['auditor', 'model.py', '-q']; from auditor.cli import main; sys.exit(main())"
    code, errors = ended(tmp_path, root, "-c", run)
    assert code == 2
    assert "error: no temporary directory can be written to: name one with TMPDIR" in errors
    assert "Traceback" not in errors
