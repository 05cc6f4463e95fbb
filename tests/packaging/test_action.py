"""The GitHub action and the pre-commit hook: their steps, run as those programs would run them."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import make_venv

yaml = pytest.importorskip("yaml")

MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x).masked_fill(x > 0, -1e9).softmax(-1)
def get_model(): return Net()
def get_inputs(): return torch.ones(4, 8)
"""


@pytest.fixture(scope="module")
def action(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "action.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_venv(tmp_path_factory.mktemp("python") / "venv")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    (folder / ".git").mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    return folder


class Runner:
    """As much of GitHub's runner as composite actions ask for."""

    def __init__(self, action: dict[str, Any], where: Path, python: Path, checkout: Path, **given: str) -> None:
        self.steps, self.where = action["runs"]["steps"], where
        inputs = {name: str(item.get("default", "")) for name, item in action["inputs"].items()}
        assert given.keys() <= inputs.keys()
        self.values = {f"inputs.{name}": value for name, value in {**inputs, **given}.items()}
        self.values["github.action_path"] = str(checkout)
        self.outputs, self.summary = where.parent / "outputs", where.parent / "summary"
        self.environment = {
            **os.environ,
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(self.outputs),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PYTHONPATH": "",
        }

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: self.values[found[1]], text)

    def run(self, name: str) -> subprocess.CompletedProcess[str]:
        """One step, which has to run a command in bash as the runner starts it."""
        step = next(step for step in self.steps if step["name"] == name)
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]  # what a user gives stands in variables, not in the script
        environment = {key: self.filled(value) for key, value in step.get("env", {}).items()}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            command, cwd=self.where, env={**self.environment, **environment}, capture_output=True, text=True
        )
        for line in self.outputs.read_text().splitlines() if self.outputs.exists() else ():
            key, _, value = line.partition("=")
            self.values[f"steps.{step.get('id')}.outputs.{key}"] = value
        return done


@pytest.mark.slow
def test_the_action_installs_audits_and_ends_as_the_audit_did(
    action: dict[str, Any], repository: Path, checkout: Path, tmp_path: Path
) -> None:
    python = make_venv(tmp_path / "venv")
    runner = Runner(
        action, repository, python, checkout, target="model.py", arguments="--formats fp16 --strategies cast -q"
    )
    runner.values["inputs.fail-on"] = "info"
    done = runner.run("Install")
    assert done.returncode == 0, done.stderr
    assert (python.parent / "auditor").exists()
    done = runner.run("Audit")
    assert done.returncode == 0, done.stderr
    assert "::" in done.stdout
    assert "file=model.py,line=9" in done.stdout
    assert runner.values["steps.audit.outputs.exit-code"] == "1"
    assert runner.summary.read_text().startswith("## Precision audit")
    upload = next(step for step in runner.steps if "uses" in step)
    sarif = json.loads((repository / runner.filled(upload["with"]["sarif_file"])).read_text())
    assert sarif["runs"][0]["results"]
    assert runner.run("Result").returncode == 1
    known = Runner(
        action, repository, python, checkout, target="model.py", baseline="audits/model", out="audits/two",
        arguments="--formats fp16 --strategies cast -q",
    )  # fmt: skip
    known.values["inputs.fail-on"] = "info"
    assert known.run("Audit").returncode == 0
    assert known.values["steps.audit.outputs.exit-code"] == "0"
    assert known.run("Result").returncode == 0


@pytest.mark.parametrize(
    ("target", "arguments", "code", "said"),
    [
        ("model.py", "--criterion 'output: rel_l2 <= 0.5'\n  --quick", 0, ""),
        (
            "model.py",
            "--criterion 'output: rel_l2 <= 0.5",
            2,
            "error: the input arguments has a quote that is not closed",
        ),
        ("absent.py; touch canary", "", 2, "error: "),
    ],
)
def test_quotes_hold_an_argument_together_and_what_cannot_be_audited_fails_the_job(
    action: dict[str, Any],
    repository: Path,
    tmp_path: Path,
    root: Path,
    python: Path,
    target: str,
    arguments: str,
    code: int,
    said: str,
) -> None:
    given = {"target": target, "arguments": f"--dry-run {arguments}".strip()}
    runner = Runner(action, repository, python, tmp_path, **given)
    runner.environment["PYTHONPATH"] = str(root)
    done = runner.run("Audit")
    assert (done.returncode, runner.values["steps.audit.outputs.exit-code"]) == (0, str(code)), done.stderr
    assert said in done.stderr
    assert runner.run("Result").returncode == code
    assert not (repository / "canary").exists()
    upload = next(step for step in runner.steps if "uses" in step)
    assert upload["if"] == "inputs.upload == 'true' && steps.audit.outputs.exit-code != '2'"


def test_the_hook_runs_the_command(root: Path) -> None:
    (hook,) = yaml.safe_load((root / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert {"id", "name", "entry", "language"} <= hook.keys()
    assert hook["language"] == "system"  # an environment of its own would lack what the model imports
    assert not hook["pass_filenames"]
    scripts = re.findall(r"(?m)^\[project\.scripts\]\n(\w+) = ", (root / "pyproject.toml").read_text(encoding="utf-8"))
    entry = shlex.split(hook["entry"])
    assert entry[0] in scripts
