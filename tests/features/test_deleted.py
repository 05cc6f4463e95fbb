"""Every feature is its folder and its line: without them the product works, and says no word of the feature."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from auditor.features import FEATURES

MODEL = """
import torch
from torch import nn

def get_model():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

def get_inputs():
    return torch.randn(8, 16)
"""
HELP, AUDIT = ("--help",), ("net.py", "--strategies", "autocast,graph", "--out", "out")
"""Words of the commands that are run: no feature but the deleted one may be missed by any of them."""


def check_without(features: Sequence[str], root: Path, folder: Path) -> None:
    """A copy of the package, in which the folders and lines of features are deleted, audits a model."""
    for name in ("auditor", "rules", "reports", "docs"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    registry = folder / "auditor" / "features" / "__init__.py"
    text = registry.read_text(encoding="utf-8")
    for feature in features:
        shutil.rmtree(folder / "auditor" / "features" / feature)
        line = f'    "{feature}",\n'
        assert text.count(line) == 1
        text = text.replace(line, "")
    registry.write_text(text, encoding="utf-8")
    (folder / "net.py").write_text(MODEL)
    for words in (HELP, AUDIT):
        run = subprocess.run(
            [sys.executable, "-m", "auditor", *words], cwd=folder, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
    assert (folder / "out" / "report.html").is_file()


def test_without_any_feature_the_product_works(root: Path, tmp_path: Path) -> None:
    check_without(FEATURES, root, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_the_product_works(feature: str, root: Path, tmp_path: Path) -> None:
    check_without([feature], root, tmp_path)


@pytest.mark.parametrize("feature", FEATURES)
def test_nothing_outside_names_a_feature(feature: str, root: Path) -> None:
    """What is not in the folder finds it by the registry."""
    package = root / "auditor"
    folder = package / "features" / feature
    public = package / "__init__.py"  # names the modules of public functions
    files = [file for file in package.rglob("*.py") if not file.is_relative_to(folder) and file != public]
    assert [file for file in files if f"features.{feature}" in file.read_text(encoding="utf-8")] == []
