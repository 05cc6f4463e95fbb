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


def test_no_temporary_directory_is_one_line(tmp_path: Path, root: Path) -> None:
    nowhere = "import tempfile, sys; tempfile._candidate_tempdir_list = lambda: ['/nowhere/at/all']"
    run = f"{nowhere}; sys.argv = ['auditor', 'model.py', '-q']; from auditor.cli import main; sys.exit(main())"
    code, errors = ended(tmp_path, root, "-c", run)
    assert code == 2
    assert "error: no temporary directory can be written to: name one with TMPDIR" in errors
    assert "Traceback" not in errors
