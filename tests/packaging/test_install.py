"""Wheel, editable install and plain checkout each find the rules and the templates, away from the developer's tree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

PROBE = """
import json, pathlib, auditor
from auditor.resources import resource_dir
from auditor.rulebook import load_rules
print(json.dumps({
    "package": auditor.__file__,
    "rules": sorted(rule.code for rule in load_rules()),
    "templates": sorted(path.name for path in resource_dir("reports").glob("*.jinja")),
    "folders": [str(resource_dir("rules")), str(resource_dir("reports"))],
}))
"""
BUILD = "from setuptools import build_meta; build_meta.build_{kind}({folder!r})"
LEFT_OUT = (".git", ".venv", "build", "dist", "audits", "actual", "samples", "*.egg-info", "__pycache__", ".*_cache")


def run(words: Sequence[object], cwd: Path) -> str:
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True)
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


@pytest.fixture(scope="module")
def checkout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree as it stands, so that building leaves nothing behind in it."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-c", BUILD.format(kind="sdist", folder=str(folder))], checkout)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that what either of them forgets is missed."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run([sys.executable, "-c", BUILD.format(kind="wheel", folder=str(folder))], next(folder.glob("model_*/")))
    return next(folder.glob("*.whl"))


def expected(checkout: Path) -> tuple[list[str], list[str]]:
    rules = sorted(path.name[:6] for path in checkout.glob("rules/*/*.toml"))
    return rules, sorted(path.name for path in checkout.glob("reports/*.jinja"))


def check(answer: str, checkout: Path, package: Path, data: Path) -> None:
    found = json.loads(answer)
    rules, templates = expected(checkout)
    assert rules
    assert templates
    assert (found["rules"], found["templates"]) == (rules, templates)
    assert Path(found["package"]).parent == package
    assert found["folders"] == [str(data / "rules"), str(data / "reports")]


def test_wheel(wheel, checkout, tmp_path):
    python = make_venv(tmp_path / "venv")
    install(python, wheel)
    package = next((tmp_path / "venv").glob("lib/python*/site-packages/auditor"))
    check(run([python, "-c", PROBE], tmp_path), checkout, package, data=package)
    assert "explain CODE" in run([python.parent / "auditor", "--help"], tmp_path)


def test_wheel_run_from_inside_the_checkout(wheel, checkout, tmp_path):
    python = make_venv(tmp_path / "venv")
    install(python, wheel)
    check(run([python, "-c", PROBE], checkout), checkout, checkout / "auditor", data=checkout)


def test_editable_install(checkout, tmp_path):
    python = make_venv(tmp_path / "venv")
    install(python, "--editable", checkout)
    check(run([python, "-c", PROBE], tmp_path), checkout, checkout / "auditor", data=checkout)
    assert not (checkout / "auditor" / "rules").exists()


def test_plain_checkout(checkout, tmp_path):
    python = make_venv(tmp_path / "venv")
    check(run([python, "-c", PROBE], checkout), checkout, checkout / "auditor", data=checkout)


def test_wheel_holds_the_package_and_its_data_alone(wheel, checkout):
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert {name.parts[0].split("-")[0] for name in names} == {"auditor", "model_precision_auditor"}
    modules = {path.relative_to(checkout) for path in checkout.glob("auditor/**/*.py")}
    assert modules <= set(names)
    for data in ("rules", "reports"):
        here = {
            Path("auditor") / path.relative_to(checkout) for path in checkout.glob(f"{data}/**/*") if path.is_file()
        }
        assert {name for name in names if name.parts[:2] == ("auditor", data)} == here
    assert Path("auditor/py.typed") in names
    assert [name for name in names if name.name == "LICENSE"]
