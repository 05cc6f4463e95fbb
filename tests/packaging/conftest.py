"""What packages are built of, once for all of these tests, and virtual environments to install them into."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

LEFT_OUT = (".git", ".venv", "build", "dist", "audits", "actual", "samples", "*.egg-info", "__pycache__", ".*_cache")


def run(words: Sequence[object], cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_venv(folder: Path) -> Path:
    """A venv that borrows the developer's packages, though not what is installed there as editable."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(python: Path, *what: object) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", "--no-build-isolation", *what], python.parent)


@pytest.fixture(scope="session")
def checkout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree as it stands, so that building leaves nothing behind in it."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return folder


@pytest.fixture(scope="session")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `python -m build` put an sdist, and the wheel that it built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder], checkout)
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))
