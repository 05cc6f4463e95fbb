"""Where a command's files go: the default, and beside whose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from auditor.cli.verbs import default_directory
from auditor.document.places import portable_path
from tests.unit.report.factory import make_audit

AUDIT = make_audit(4)


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
    replace(AUDIT, subject=replace(AUDIT.subject, file=portable_path(first.origin.path))).save(
        tmp_path / "audits" / "net"
    )
    assert [default_directory(one) for one in (first, other)] == [Path("audits/net"), Path("audits/a-net")]
