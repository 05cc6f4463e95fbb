"""Where a command's files go: the default, what stands in their way, and that the text of each is made for that place."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.cli.publish import FILES, check, default_directory, write
from auditor.errors import AuditorError
from tests.unit.report.factory import make_audit


class Saves:
    def texts(self, directory: Path) -> dict[str, str]:
        return {"plan.json": f"made for {directory.name}", "report.html": "new"}


def test_texts_are_made_for_the_directory_they_go_to(tmp_path):
    files = write(Saves(), tmp_path / "audit", {"model_explorer/graph.json": "{}"})
    assert [str(file.relative_to(tmp_path / "audit")) for file in files] == [
        "plan.json",
        "report.html",
        "model_explorer/graph.json",
    ]
    assert (tmp_path / "audit" / "plan.json").read_text() == "made for audit"
    assert (tmp_path / "audit" / "model_explorer" / "graph.json").read_text() == "{}"


def test_the_files_asked_after_are_those_written(tmp_path):
    assert set(make_audit(4).texts(tmp_path)) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_users_own_directory_is_not_replaced(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").touch()
    with pytest.raises(AuditorError, match=f"{name} is a directory") as caught:
        check(tmp_path)
    assert caught.value.slug == "bad-output"
    with pytest.raises(AuditorError, match="cannot be written to"):
        write(make_audit(4), tmp_path)
    assert (tmp_path / name / "mine").exists()


def test_a_file_where_the_explorers_files_go(tmp_path):
    (tmp_path / "model_explorer").touch()
    check(tmp_path)
    with pytest.raises(AuditorError, match="model_explorer is a file"):
        check(tmp_path, explorer=True)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("net-Net", "net-Net"), ("../../etc", "_.._etc"), ("a/b c\n", "a_b_c_"), ("..", "model"), ("", "model")],
)
def test_default_directory_stays_under_audits(name, folder):
    assert default_directory(name) == Path("audits") / folder
