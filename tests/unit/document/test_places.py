"""Files as seen from their repository, wherever that lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.document.places import from_repository, installed, portable, shown


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "models").mkdir()
    return tmp_path / "repo"


def test_a_file_of_a_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (repository, repository / "models", repository.parent):
        monkeypatch.chdir(folder)
        assert from_repository(repository / "models" / "net.py") == "models/net.py"


def test_a_file_of_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    assert from_repository(tmp_path / "work" / "net.py") == "work/net.py"
    monkeypatch.chdir(tmp_path / "work")
    assert from_repository(tmp_path / "net.py") == "net.py"
    assert from_repository(Path("net.py")) == "net.py"


def test_an_installed_file() -> None:
    path = "/home/me/env/lib/python3.12/site-packages/timm/layers/mlp.py"
    assert shown(path) == "site-packages/timm/layers/mlp.py" == shown(shown(path))
    assert installed(path)
    assert installed(shown(path))
    assert not installed("model.py")
    assert not installed(None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/nowhere/at/all/net.py:build", "net.py:build"),
        ("net.py:build", "net.py:build"),
        ("sub/net.py:Net(width=8)", "sub/net.py:Net(width=8)"),
        ("--weights /nowhere/w.pt", "--weights w.pt"),
        ("hf:/nowhere/model", "hf:model"),
        ("hf:org/name@main", "hf:org/name@main"),
        ("https://example.org/a", "https://example.org/a"),
        ("~/net.py, ../net.py", "~/net.py, ../net.py"),
        ("random initialisation, seed 0", "random initialisation, seed 0"),
    ],
)
def test_a_text_keeps_no_absolute_path(text: str, said: str) -> None:
    assert portable(text) == said
