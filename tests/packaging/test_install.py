"""Wheel, editable install and plain checkout each find the rules and the templates, away from the developer's tree."""

import email
import json
import re
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import auditor
from tests.packaging.conftest import install, make_venv, run

PROBE = """
import json, pathlib, auditor
from auditor.resources import resource_dir
from auditor.rulebook.load import load_rules
print(json.dumps({
    "package": auditor.__file__,
    "rules": sorted(rule.code for rule in load_rules()),
    "templates": sorted(path.name for path in resource_dir("reports").glob("*.jinja")),
    "folders": [str(resource_dir("rules")), str(resource_dir("reports"))],
}))
"""


def check(answer: str, checkout: Path, package: Path, data: Path) -> None:
    found = json.loads(answer)
    assert found["rules"] == sorted(path.name[:6] for path in checkout.glob("rules/*/*.toml")) != []
    assert found["templates"] == sorted(path.name for path in checkout.glob("reports/*.jinja")) != []
    assert Path(found["package"]).parent == package
    assert found["folders"] == [str(data / "rules"), str(data / "reports")]


def test_wheel(wheel, checkout, tmp_path):
    python = make_venv(tmp_path / "venv")
    install(python, wheel)
    package = next((tmp_path / "venv").glob("lib/python*/site-packages/auditor"))
    check(run([python, "-c", PROBE], tmp_path), checkout, package, data=package)
    check(run([python, "-c", PROBE], checkout), checkout, checkout / "auditor", data=checkout)  # a checkout comes first
    assert "explain-layer" in run([python.parent / "auditor", "--help"], tmp_path)
    assert run([python, "-m", "auditor", "--version"], tmp_path).startswith("auditor ")
    assert "No file and no importable module" in run([python, "-m", "auditor", "explain", "missing-target"], tmp_path)


@pytest.mark.slow
def test_editable_install(checkout, tmp_path):
    python = make_venv(tmp_path / "venv")
    install(python, "--editable", checkout)
    check(run([python, "-c", PROBE], tmp_path), checkout, checkout / "auditor", data=checkout)
    assert not (checkout / "auditor" / "rules").exists()


def test_wheel_holds_the_package_and_its_data_alone(wheel, checkout):
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert {name.parts[0].split("-")[0] for name in names} == {"auditor", "model_precision_auditor"}
    modules = {path.relative_to(checkout) for path in checkout.glob("auditor/**/*.py")}
    assert modules <= set(names)
    for data in ("rules", "reports"):
        here = {Path("auditor") / p.relative_to(checkout) for p in checkout.glob(f"{data}/**/*") if p.is_file()}
        assert {name for name in names if name.parts[:2] == ("auditor", data)} == here
    assert {Path("auditor/py.typed"), Path("auditor/docs/errors.md"), Path("auditor/docs/glossary.md")} <= set(names)
    assert [name for name in names if name.name == "LICENSE"]


# What a package index shows: a page whose pictures and links lead somewhere, addresses, and classifiers it knows.


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(archive.read(name).decode("utf-8"))


def test_both_files_pass_the_check_of_the_index(built: Path) -> None:
    files = sorted(built.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    assert all(auditor.__version__ in file.name for file in files)
    assert run([sys.executable, "-m", "twine", "check", "--strict", *files], built).count("PASSED") == 2


def test_every_link_of_the_page_is_absolute_and_leads_to_a_file(metadata: Message, root: Path) -> None:
    text = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    repository = next(line.split(", ")[1] for line in metadata.get_all("Project-URL", []) if line.startswith("Repo"))
    pictures = f"{repository.replace('github.com', 'raw.githubusercontent.com')}/main/"
    own = [target for target in targets if target.startswith((repository, pictures))]
    assert len(own) > 10
    assert any(target.startswith(pictures) and target.endswith(".png") for target in own)
    for target in targets:
        assert target.startswith(("https://", "#")), target
    for target in own:
        path = target.removeprefix(f"{repository}/blob/main/").removeprefix(pictures).partition("#")[0]
        assert (root / path).exists(), target
