"""`make gpu`: what is done is not done again, what was cut short goes on, and what is missing is said."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from auditor.records import NodeError
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.both import ratios_of, spread
from benchmarks.gpu.steps import STEPS
from benchmarks.gpu.summary import summary

ROOT = Path(__file__).resolve().parents[1]
MACHINE = {"device": "NVIDIA H100 80GB", "driver": "580", "cuda": "13.0", "torch": "2.11.0+cu130", "code": "abc"}


def gpu(*arguments: str, limit: int = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def result_of(folder: Path, step: str) -> Any:
    (file,) = folder.glob(f"*/{step}.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_every_step_runs_small_and_not_again(tmp_path: Path) -> None:
    # A step's own limit is that of a fast machine with a GPU; this one emulates it.
    done = gpu("--device", "pretend", "--limit", "400", "--results", str(tmp_path), limit=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in STEPS:
        found = result_of(tmp_path, step.name)
        assert found["status"] == "done" and found["rows"], step.name
        assert not [row for row in found["rows"].values() if "error" in row], step.name
    again = gpu("corpus", "--device", "pretend", "--results", str(tmp_path))
    assert again.returncode == 0 and "corpus: done before" in again.stdout
    found = result_of(tmp_path, "corpus")
    assert found["machine"]["device"] == "Pretend GPU" and len(found["rows"]) == 4
    assert {(row["holds"] is True, row["twin holds"]) for row in found["rows"].values()} == {(False, True)}
    (text,) = (file.read_text() for file in tmp_path.glob("*/summary.md"))
    assert "Known failures: 4 of 4 happen natively; 0 of their twins fail." in text
    assert result_of(tmp_path, "one_thread")["rows"]["07_vae_decoder.py"]["threads"] == 1
    tests = result_of(tmp_path, "tests")["rows"]["nodes"]
    assert tests["passed"] > 30 and not tests.get("failed") and not tests.get("error")
    published = result_of(tmp_path, "published")["rows"]
    assert all(row["native equals emulated"] for row in published.values())
    example = result_of(tmp_path, "examples")["rows"]["07_vae_decoder.py"]
    assert example["execution"] == "native" and example["differences"] == [] and example["verdicts"] == []
    assert all(row["agree"] for row in result_of(tmp_path, "operations")["rows"].values())


class Children:
    """Children that make a row each time they are asked, and are done at the last."""

    def __init__(self, rows: int) -> None:
        self.rows, self.asked = rows, 0

    def __call__(self, arguments: list[str], limit: int, environment: object) -> tuple[str, str]:
        self.asked += 1
        file = Path(arguments[1])
        made = json.loads(file.read_text()) if file.exists() else {}
        made[f"row {len(made)}"] = {"took": 1.0}
        file.write_text(json.dumps(made))
        return ("done", "") if len(made) == self.rows else ("cut short", "its seconds were over")


def ran(folder: Path, machine: dict[str, str], *more: str) -> Any:
    command.run_step(folder / "ratios.json", ["ratios", str(folder / "ratios.rows"), "cuda", *more], 5, machine, {})
    return json.loads((folder / "ratios.json").read_text())


def test_a_step_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(2)
    monkeypatch.setattr(command, "run_child", children)
    assert (ran(tmp_path, MACHINE)["status"], children.asked) == ("cut short", 1)
    second = ran(tmp_path, MACHINE)
    assert (second["status"], list(second["rows"])) == ("done", ["row 0", "row 1"])
    assert ran(tmp_path, MACHINE) == second and children.asked == 2


@pytest.mark.parametrize("other", [{"code": "def"}, {"driver": "590"}])
def test_results_of_other_code_or_another_driver_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    monkeypatch.setattr(command, "run_child", Children(2))
    ran(tmp_path, MACHINE)
    assert list(ran(tmp_path, {**MACHINE, **other})["rows"]) == ["row 0"]


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "gpu").mkdir(parents=True)
    (tmp_path / "benchmarks" / "gpu" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "gpu" / "child.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.run_child(["ratios"], 1, dict(os.environ))[0] == "cut short"
    (tmp_path / "benchmarks" / "gpu" / "child.py").write_text("raise ValueError('in a word')")
    assert command.run_child(["ratios"], 60, dict(os.environ)) == ("ended", "exit code 1: ValueError: in a word")


def test_the_summary_lists_published_results_that_differ() -> None:
    same = {
        "native": "1",
        "emulated": "1",
        "published": "1",
        "native equals emulated": True,
        "native equals published": True,
    }
    other = {**same, "native": "2", "native equals emulated": False, "native equals published": False}
    result = {"status": "done", "seconds": 1.0, "rows": {"pytorch#1": same, "pytorch#2": other}}
    text = summary(MACHINE, {"published": result})
    assert "Published results: 1 of 2 are the same natively; 1 are emulated as they are natively." in text
    assert "| pytorch#2 | 1 | 2 | 1 |" in text
    assert "| pytorch#1 |" not in text


def test_ratios_are_of_what_both_have() -> None:
    ours = {"a": NodeError(local_error=2.0), "b": NodeError(local_error=1.0), "c": NodeError(unsupported="no")}
    theirs = {"a": NodeError(local_error=1.0), "b": NodeError(local_error=0.0), "c": NodeError(local_error=1.0)}
    assert ratios_of(ours, theirs) == [2.0]
    assert spread([2.0])["median"] == 2.0 and spread([])["median"] is None
    assert spread([1.0, 1.0, 1.0, 2.0])["median"] == 1.0
