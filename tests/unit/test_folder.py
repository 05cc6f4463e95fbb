"""Files appear together or not at all."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from auditor.errors import AuditorError
from auditor.records.folder import OWN, check_directory, write
from tests.support.refusing import refused


def refusal(action: Callable[[], object]) -> str:
    """The one line that it is refused with."""
    with refused(AuditorError, "bad-output") as caught:
        action()
    return str(caught.value)


def contents(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_own_files_are_replaced_and_others_kept(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "audit"
    (target / "below").mkdir(parents=True)
    (target / "plan.json").write_text("old")
    (target / "notes.txt").write_text("mine")
    (target / "below" / "mine").write_text("mine")
    files = write(target, {"plan.json": "new", "below/graph.json": "n\u00e9w"})
    assert files == (target / "plan.json", target / "below" / "graph.json")
    assert contents(target) == {
        "plan.json": "new",
        "below/graph.json": "n\u00e9w",
        "notes.txt": "mine",
        "below/mine": "mine",
    }
    assert [path.name for path in target.parent.iterdir()] == ["audit"]


@pytest.mark.parametrize("there", ["plan.json/mine", "below"])
def test_what_stands_in_the_way_is_not_replaced_nor_anything_else(there: str, tmp_path: Path) -> None:
    (tmp_path / there).parent.mkdir(exist_ok=True)
    for name in (there, "audit.html", "gone"):
        (tmp_path / name).write_text("old")
    said = refusal(lambda: write(tmp_path, {"audit.html": "new", "plan.json": "new", "below/x": "new"}, gone=["gone"]))
    assert ("plan.json is a directory" if there != "below" else "File exists") in said
    assert set(contents(tmp_path).values()) == {"old"} and len(contents(tmp_path)) == 3


def test_a_failure_leaves_the_old_files_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "plan.json").write_text("old")
    real = Path.write_bytes

    def full(self: Path, text: bytes) -> int:
        if self.name == "report.html":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return real(self, text)

    monkeypatch.setattr(Path, "write_bytes", full)
    for name in ("old", "new/deeper"):
        said = refusal(lambda name=name: write(tmp_path / name, {"plan.json": "new", "report.html": "new"}))
        assert "No space left on device" in said
        assert OWN not in said  # the user knows nothing of drafts
    assert contents(tmp_path) == {"old/plan.json": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_file_in_the_way_is_found_beforehand(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    assert "taken" in refusal(lambda: check_directory(tmp_path / "taken" / "inside"))
    assert "taken" in refusal(lambda: check_directory(tmp_path / "taken"))


def test_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name, target in {"good": "real", "dangling": "nowhere", "one": "two", "two": "one"}.items():
        (tmp_path / name).symlink_to(target)
    check_directory(tmp_path / "good")
    write(tmp_path / "good", {"plan.json": "new"})
    assert contents(tmp_path / "real") == {"plan.json": "new"}
    for name in ("dangling", "dangling/below", "one", "one/below"):
        refusal(lambda name=name: write(tmp_path / name, {"plan.json": "new"}))


@pytest.mark.parametrize(
    "name",
    ["a\nb c", "d" * 200, os.fsdecode(b"\xff\xfe"), "x/../y/../z", "\u00e9\u202e"],
    ids=["newline", "long", "bytes", "dots", "unicode"],
)
def test_names_that_a_file_system_takes(name: str, tmp_path: Path) -> None:
    check_directory(tmp_path / name)
    write(tmp_path / name, {"plan.json": "new"})
    assert (tmp_path / name / "plan.json").read_text() == "new"


@pytest.mark.parametrize("name", ["d" * 300, "dd/" * 2000, "a\0b"], ids=["long", "deep", "zero"])
def test_names_that_it_does_not_take(name: str, tmp_path: Path) -> None:
    assert len(refusal(lambda: write(tmp_path / name, {"plan.json": "new"}))) < 400
    if "\0" not in name:  # no argument of a command holds one
        refusal(lambda: check_directory(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_found_beforehand(tmp_path: Path, root: Path) -> None:
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom auditor.records.folder import check_directory, write\n"
        "from auditor.errors import AuditorError\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for action in (lambda: check_directory(Path('out')), lambda: write(Path('out'), {'plan.json': 'x' * 2000})):\n"
        "    try: action()\n    except AuditorError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 2
    assert all("File too large" in line for line in done.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []
