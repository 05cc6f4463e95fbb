"""Files as seen from their repository, wherever that lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.document.places import from_repository, is_installed, portable, portable_path


def test_a_file_is_seen_from_its_repository_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("repo/.git", "repo/models", "work"):
        (tmp_path / folder).mkdir(parents=True)
    for folder, file, said in (
        ("repo", "repo/models/net.py", "models/net.py"),
        (".", "repo/models/net.py", "models/net.py"),
        (".", "work/net.py", "work/net.py"),
        ("work", "net.py", "net.py"),
    ):
        monkeypatch.chdir(tmp_path / folder)
        assert from_repository(tmp_path / file) == said
    path = "/home/me/env/lib/python3.12/site-packages/timm/layers/mlp.py"
    assert portable_path(path) == "site-packages/timm/layers/mlp.py" == portable_path(portable_path(path))
    assert is_installed(path) and is_installed(portable_path(path))
    assert not is_installed("model.py") and not is_installed(None)


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
