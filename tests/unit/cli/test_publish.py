"""An audit's files appear together or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.cli.publish import check_directory, default_directory, write, write_text
from auditor.errors import AuditorError


class Saves:
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def save(self, directory: Path) -> None:
        (directory / "plan.json").write_text("new")
        if self.fails:
            raise RuntimeError("disk full")
        (directory / "report.html").write_text("new")


def test_own_files_are_replaced_and_others_kept(tmp_path):
    target = tmp_path / "deep" / "audit"
    target.mkdir(parents=True)
    (target / "plan.json").write_text("old")
    (target / "notes.txt").write_text("mine")
    files = write(Saves(), target)
    assert files == (target / "plan.json", target / "report.html")
    assert {p.name: p.read_text() for p in target.iterdir()} == {
        "plan.json": "new",
        "report.html": "new",
        "notes.txt": "mine",
    }


def test_failure_leaves_the_old_files_and_nothing_else(tmp_path):
    target = tmp_path / "audit"
    target.mkdir()
    (target / "plan.json").write_text("old")
    with pytest.raises(RuntimeError):
        write(Saves(fails=True), target)
    assert [p.name for p in tmp_path.iterdir()] == ["audit"]
    assert {p.name: p.read_text() for p in target.iterdir()} == {"plan.json": "old"}


def test_a_file_in_the_way_is_found_beforehand(tmp_path):
    (tmp_path / "taken").touch()
    check_directory(tmp_path / "free" / "deeper")
    with pytest.raises(AuditorError, match="taken is a file"):
        check_directory(tmp_path / "taken" / "inside")
    assert not (tmp_path / "free").exists()


def test_one_file_is_replaced_whole(tmp_path):
    file = tmp_path / "deep" / "patched_model.py"
    assert write_text("old", file) == file
    write_text("néw", file)
    assert file.read_text(encoding="utf-8") == "néw"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("name", "folder"),
    [("net-Net", "net-Net"), ("../../etc", "_.._etc"), ("a/b c\n", "a_b_c_"), ("..", "model"), ("", "model")],
)
def test_default_directory_stays_under_audits(name, folder):
    assert default_directory(name) == Path("audits") / folder
