"""Where a command's files go: the default, and what stands in their way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from auditor.cli.publish import FILES, check, default_directory, write
from auditor.document.places import shown
from auditor.errors import AuditorError
from tests.unit.report.factory import make_audit

AUDIT = make_audit(4)


def test_the_files_asked_after_are_those_written(tmp_path):
    files = write(AUDIT, tmp_path / "audit", explorer=False)
    assert {str(file.relative_to(tmp_path / "audit")) for file in files} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_users_own_directory_is_not_replaced(name, tmp_path):
    (tmp_path / name / "mine").mkdir(parents=True)
    with pytest.raises(AuditorError, match=f"{name} is a directory") as caught:
        check(tmp_path, explorer=False)
    assert caught.value.slug == "bad-output"
    with pytest.raises(AuditorError, match="cannot be written to"):
        write(AUDIT, tmp_path, explorer=False)
    assert (tmp_path / name / "mine").exists()


def test_a_file_where_the_explorers_files_go(tmp_path):
    (tmp_path / "model_explorer").touch()
    check(tmp_path, explorer=False)
    with pytest.raises(AuditorError, match="model_explorer is a file"):
        check(tmp_path, explorer=True)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("net-Net", "net-Net"), ("../../etc", "_.._etc"), ("a/b c\n", "a_b_c_"), ("..", "model"), ("", "model")],
)
def test_default_directory_stays_under_audits(name, folder):
    assert default_directory(SimpleNamespace(name=name, origin=None)) == Path("audits") / folder


def test_a_model_of_another_file_gets_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, other = (
        SimpleNamespace(name="net", origin=SimpleNamespace(path=str(tmp_path / at))) for at in ("b/n", "a/n")
    )
    replace(AUDIT, subject=replace(AUDIT.subject, file=shown(first.origin.path))).save(tmp_path / "audits" / "net")
    assert [default_directory(one) for one in (first, other)] == [Path("audits/net"), Path("audits/a-net")]
