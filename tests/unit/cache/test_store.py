"""The folder of a cache: entries are whole, and of what was asked for, or there are none."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import pytest

from auditor.cache.store import Store, check
from auditor.errors import AuditorError

KEY = f"runs-{'a' * 64}"
HELD = {"fp16 add": [0.1 + 0.2, True, "", 3], "far": [math.inf, False, "x: y", 0]}


def test_an_entry_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "er")
    assert store.get(KEY) is None
    store.put(KEY, HELD)
    assert Store(tmp_path / "deep" / "er").get(KEY) == HELD
    assert store.get(f"runs-{'b' * 64}") is None
    assert [file.name for file in (tmp_path / "deep" / "er").iterdir()] == [f"{KEY}.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"auditor_cache": 2},
        {"key": f"runs-{'c' * 64}"},
        {"sha256": "0" * 64},
        {"holds": {**HELD, "far": [1.0, False, "x: y", 0]}},
    ],
)
def test_what_was_not_written_so_is_not_read(change: dict[str, object], tmp_path: Path) -> None:
    store, file = Store(tmp_path), tmp_path / f"{KEY}.json"
    store.put(KEY, HELD)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert store.get(KEY) is None
    store.put(KEY, HELD)
    assert store.get(KEY) == HELD


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '"x"', "[" * 50_000, "\ud800", "1" * 5000])
def test_anything_else_is_not_read(text: str, tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert Store(tmp_path).get(KEY) is None


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{KEY}.json")
    assert Store(tmp_path).get(KEY) is None
    (tmp_path / f"{KEY}.json").unlink()
    (tmp_path / f"{KEY}.json").mkdir()
    store = Store(tmp_path)
    assert store.get(KEY) is None
    store.put(KEY, HELD)
    assert "irectory" in store.failed
    assert [entry.name for entry in tmp_path.iterdir()] == [f"{KEY}.json"]


def test_two_at_once_leave_a_whole_entry(tmp_path: Path) -> None:
    many = [{str(n): [float(n)] * 200} for n in range(4)]
    writers = [
        threading.Thread(target=lambda held=held: [Store(tmp_path).put(KEY, held) for _ in range(20)]) for held in many
    ]
    for writer in writers:
        writer.start()
    seen = [Store(tmp_path).get(KEY) for _ in range(40)]
    for writer in writers:
        writer.join()
    assert all(found is None or found in many for found in seen)
    assert Store(tmp_path).get(KEY) in many


def test_after_one_failure_nothing_is_tried(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file")
    store.put(KEY, HELD)
    assert store.failed
    (tmp_path / "file").unlink()
    store.put(KEY, HELD)
    assert not (tmp_path / "file").exists()


def test_a_place_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    check(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for bad in (
        tmp_path / "file",
        tmp_path / "lost",
        tmp_path / "file" / "x",
        Path("/proc/1"),
        Path("a\0b"),
        Path("a" * 300),
    ):
        with pytest.raises(AuditorError) as caught:
            check(bad)
        assert caught.value.slug == "bad-cache"
        assert "\n" not in str(caught.value)
