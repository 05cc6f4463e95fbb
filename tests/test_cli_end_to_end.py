"""The command as a user runs it: real examples in, files and exit codes out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.document.codec import laid_out, steady
from tests.files.test_strangers import run

EXAMPLES = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "examples").glob("[0-9]*.py"))
FILES = {"report.html", "plan.json", "measurements.json", "patched_model.py", "findings.sarif"}
PLANS = {"autocast_fp16", "autocast_bf16", "cast_fp16", "cast_bf16"}


def auditor(*words: object, cwd: Path, root: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "auditor", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


def audited(name: str, cwd: Path, root: Path) -> subprocess.CompletedProcess[str]:
    done = auditor(root / "examples" / f"{name}.py", cwd=cwd, root=root)
    assert done.returncode in (0, 1), done.stderr
    return done


def check_plan(folder: Path) -> None:
    plan, measured = (json.loads((folder / name).read_text()) for name in ("plan.json", "measurements.json"))
    assert plan["format_version"] == measured["format_version"] == 1
    assert set(plan["plans"]) == PLANS
    assert set(plan["baselines"]) == PLANS
    assert plan["recommended"] in PLANS
    chosen = plan["plans"][plan["recommended"]]
    assert chosen["verification"]["holds"] is True
    assert chosen["verification"]["measured_error"] <= plan["max_error"]
    verdicts = {one["verdict"] for node in measured["nodes"] for one in node["verdicts"].values()}
    assert verdicts <= {"safe", "sensitive", "unsafe", "untested"}
    assert "safe" in verdicts


@pytest.fixture(scope="module")
def first(root, tmp_path_factory):
    """The first example, audited once: where, and how the command ended."""
    folder = tmp_path_factory.mktemp("first")
    return folder, audited("01_digits_attention", folder, root)


def test_five_files_and_nothing_else(first):
    folder, _ = first
    assert [path.name for path in (folder / "audits").iterdir()] == ["01_digits_attention"]
    assert {path.name for path in (folder / "audits" / "01_digits_attention").iterdir()} == FILES


def test_summary_fits_100_columns_and_progress_is_on_stderr(first):
    _, done = first
    assert done.stdout.strip()
    assert all(len(line) <= 100 for line in done.stdout.splitlines() if "tmp" not in line)
    assert "\x1b" not in done.stdout
    stages = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert stages[0] == "load"
    assert "write" in stages
    assert len(stages) >= 5
    assert "load: " not in done.stdout


def test_plan_is_verified(first):
    folder, _ = first
    check_plan(folder / "audits" / "01_digits_attention")


def test_exit_code_follows_the_findings(first):
    folder, done = first
    plan = json.loads((folder / "audits" / "01_digits_attention" / "plan.json").read_text())
    assert done.returncode == any(finding["severity"] == "error" for finding in plan["findings"])


@pytest.mark.slow
def test_same_input_gives_the_same_plan(first, root, here):
    """In the other process sets have another order than in this one."""
    folder, _ = first
    assert run(str(root / "examples" / "01_digits_attention.py"))[0] in (0, 1)
    one, other = (base / "audits" / "01_digits_attention" for base in (folder, here))
    assert (one / "measurements.json").read_bytes() == (other / "measurements.json").read_bytes()
    plans = [json.loads((base / "plan.json").read_text()) for base in (one, other)]
    assert laid_out(steady(plans[0])) == laid_out(steady(plans[1]))
    stages = [list(plan["environment"]["seconds"]) for plan in plans]
    assert stages == [["load", "capture", "measure", "classify", "baseline", "plan", "follow"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES[1:])
def test_every_example(name, root, tmp_path):
    audited(name, tmp_path, root)
    folder = tmp_path / "audits" / name
    assert {path.name for path in folder.iterdir()} == FILES
    check_plan(folder)
