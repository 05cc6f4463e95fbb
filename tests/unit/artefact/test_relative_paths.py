"""`patched_model.build()` from anywhere: relative paths of the user's file are those of the directory of the audit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.artefact.emit import emit
from auditor.artefact.source import make_original
from auditor.isolation.members import size_of
from auditor.loading import load

FILE = """
from pathlib import Path
import torch
from torch import nn

at_import = int(Path("sizes/width.txt").read_text())

def build():
    width = int(Path("sizes/width.txt").read_text())
    assert width == at_import
    return nn.Linear(width, 2)

def get_inputs(): return torch.ones(1, at_import)
"""
PROGRAM = "import patched_model; print(patched_model.original().in_features, __import__('os').getcwd())"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that was audited in its own folder, with patched_model.py in audits/net."""
    folder = tmp_path / "project"
    (folder / "sizes").mkdir(parents=True)
    (folder / "sizes" / "width.txt").write_text("3")
    (folder / "reads_sizes.py").write_text(FILE)
    out = folder / "audits" / "net"
    out.mkdir(parents=True)
    monkeypatch.chdir(folder)
    subject = load("reads_sizes.py:build")
    (out / "patched_model.py").write_text(emit(subject.origin, size_of(subject.model), {}, None, out))
    return folder


def built(project: Path, at: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(project / "audits" / "net")}
    return subprocess.run([sys.executable, "-c", PROGRAM], cwd=at, env=environment, capture_output=True, text=True)


def test_a_relative_path_is_found_from_elsewhere_and_the_caller_stays_where_it_was(
    project: Path, tmp_path: Path
) -> None:
    done = built(project, tmp_path)
    assert done.stdout.split() == ["3", str(tmp_path)], done.stderr


def test_without_the_directory_the_message_names_it_and_the_fix(project: Path, tmp_path: Path) -> None:
    patched = project / "audits" / "net" / "patched_model.py"
    text = patched.read_text()
    assert "'working_directory': '../..'" in text
    patched.write_text(text.replace("'working_directory': '../..'", "'working_directory': '../../gone'"))
    done = built(project, tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert "opens 'sizes/width.txt', relative to the directory of the audit" in last
    assert f"{project / 'gone'}, which is missing" in last
    assert "correct `working_directory` in SOURCE" in last


def test_a_file_that_changes_the_directory_on_import_is_built_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import, which happens once, leaves the process where the factory finds its files."""
    project = tmp_path / "moving"
    project.mkdir()
    (project / "width.txt").write_text("3")
    moving = (
        "import os\nfrom pathlib import Path\nfrom torch import nn\nos.chdir(Path(__file__).parent)\n"
        "def build(): return nn.Linear(int(Path('width.txt').read_text()), 2)\n"
    )
    (project / "changes_directory.py").write_text(moving)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    source = {
        "path": "moving/changes_directory.py",
        "digest": None,
        "module": "changes_directory",
        "working_directory": "elsewhere",
        "symbol": "build",
        "kind": "factory",
        "folder": None,
        "weights": None,
        "init_args": (),
        "init_kwargs": {},
    }
    for _ in range(2):
        model = make_original(source, str(tmp_path / "patched_model.py"), (), {})
        assert model.in_features == 3
        assert Path.cwd() == elsewhere
