"""Small projects as users have them: written to disk, audited by the real command, run again without the auditor."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.files.test_strangers import run
from tests.support.subjects import seeded

HEAD = "import torch\nfrom torch import nn\n"
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))

"""
BUILD = "def build():\n    torch.manual_seed(0)\n    return Net()\n\n"
INPUTS = "def get_inputs():\n    torch.manual_seed(1)\n    return torch.randn(8, 16)\n"
PARTS = HEAD + NET
MODEL = PARTS + BUILD + INPUTS
RANDOM = PARTS + "def build():\n    return Net()\n\n" + INPUTS

ONE_PLAN = ("--formats", "bf16", "--strategies", "cast", "--quick")
"""Options of the shortest audit that still runs its plan in a fresh process."""

HERE: tuple[str, ...] = ()
"""The program of a case that is run in this process, where what it shows does not hang on its own: that saves one."""

FP32 = "Keep the model in FP32"

RUN_AGAIN = """
import sys
sys.modules["auditor"] = None
import torch, patched_model
from torch.nn.functional import gelu, linear
model = patched_model.build()
torch.manual_seed(1)
x = torch.randn(8, 16)
a, b, c, d = torch.load({weights!r}).values()
with torch.no_grad():
    expected, output = linear(gelu(linear(x, a, b)), c, d), model({call})
print("error", ((output - expected).norm() / expected.norm()).item())
"""


@dataclass(frozen=True)
class Case:
    """One project and one command.

    files: texts by their paths below the root. cwd: the working directory, from the root. prepare: called with the root
    once the files are there. program: what comes before the target, or HERE. env: further entries of the environment; None
    removes one. call: the patched model's arguments, the input being x. weights: the file of the model's true weights, from the
    working directory; else they are those of seed 0.
    """

    files: Mapping[str, str]
    target: str = "model.py:build"
    cwd: str = "."
    options: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    prepare: Callable[[Path], object] = lambda root: None
    program: tuple[str, ...] = (sys.executable, "-m", "auditor")
    call: str = "x"
    weights: str | None = None


@dataclass(frozen=True)
class Audited:
    """A command that has ended, and the working directory it ran in."""

    case: Case
    root: Path
    cwd: Path
    done: subprocess.CompletedProcess[str]

    @property
    def said(self) -> str:
        return self.done.stdout + self.done.stderr

    @property
    def folder(self) -> Path:
        """The folder of its files. There is exactly one."""
        (plan,) = [*self.cwd.glob("audits/*/plan.json"), *self.cwd.glob("out/plan.json")]
        return plan.parent

    @property
    def plan(self) -> dict[str, Any]:
        return json.loads((self.folder / "plan.json").read_text())

    @property
    def files(self) -> list[Path]:
        """What an audit writes: nothing where it failed."""
        return [path for name in ("audits", "out", "patched_model.py") for path in self.root.parent.rglob(name)]


def state() -> dict[str, Tensor]:
    """The weights that every factory gives."""
    return seeded(lambda: nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 4)})).state_dict()


def first(statements: str, text: str = MODEL) -> str:
    """The text, where the factory begins with these statements."""
    return text.replace("def build():\n", f"def build():\n    {statements}\n")


def using(module: str) -> str:
    """A file that takes the class from another."""
    return HEAD + f"from {module} import Net\n" + BUILD + INPUTS


def package(**more: str) -> dict[str, str]:
    """A package `pkg`: its model takes the class from another of its files."""
    texts = {"parts": PARTS, "model": using(".parts"), "__init__": "", **more}
    return {f"pkg/{name}.py": text for name, text in texts.items()}


def write_project(root: Path, case: Case) -> Path:
    """The project's files; the working directory."""
    for name, text in case.files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / case.cwd).mkdir(parents=True, exist_ok=True)
    torch.save(state(), root.parent / "weights.pt")
    case.prepare(root)
    return Path(os.path.normpath(root / case.cwd))


def environment(entries: Mapping[str, str | None]) -> dict[str, str]:
    """The user's: nothing of the tests but that there is no network."""
    base = {**os.environ, "PYTHONPATH": None, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200", **entries}
    return {name: value for name, value in base.items() if value is not None}


def run_command(*words: str, cwd: Path, env: Mapping[str, str | None]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=environment(env), timeout=120)


def run_here(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        for name in ("NO_COLOR", "COLUMNS"):
            patch.setenv(name, environment({})[name])
        return subprocess.CompletedProcess(words, *run(*words))


def audit_project(root: Path, case: Case) -> Audited:
    """Write the project and audit it as its user would."""
    cwd = write_project(root, case)
    words = (case.target, *ONE_PLAN, *case.options)
    done = run_command(*case.program, *words, cwd=cwd, env=case.env) if case.program else run_here(*words, cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return Audited(case, root, cwd, done)


def check_verdict(audited: Audited) -> None:
    """The right one: BF16, by a plan that was run in a fresh process, the error that of rounding."""
    assert audited.done.returncode == 0, audited.said
    assert FP32 not in audited.said
    plan = audited.plan
    assert plan["recommended"] == "cast_bf16", audited.said
    (only,) = plan["plans"].values()
    ran = only["verification"]
    assert (ran["holds"], ran["failure"]) == (True, None)
    assert 0.002 < ran["measured_error"] < 0.006


def check_error(audited: Audited, folder: Path | None = None, cwd: Path | None = None) -> None:
    """The emitted file, in a process that has the user's `PYTHONPATH` and the audit's folder, gives the error stated."""
    folder, cwd = folder or audited.folder, cwd or audited.cwd
    done = run_again(audited, folder, cwd)
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads((folder / "plan.json").read_text())["plans"].values()
    error = float(re.findall(r"^error (.+)$", done.stdout, re.MULTILINE)[-1])
    assert error == pytest.approx(plan["verification"]["measured_error"], rel=0.1)


def run_again(audited: Audited, folder: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Build the patched model and run it, where the working directory is on nobody's path."""
    case = audited.case
    weights = cwd / case.weights if case.weights else audited.root.parent / "weights.pt"
    code = RUN_AGAIN.format(weights=str(weights), call=case.call)
    paths = os.pathsep.join(filter(None, [case.env.get("PYTHONPATH"), str(folder)]))
    return run_command(sys.executable, "-P", "-c", code, cwd=cwd, env={**case.env, "PYTHONPATH": paths})


def check_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One clear line with these words, no traceback, and exit code 2."""
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)
