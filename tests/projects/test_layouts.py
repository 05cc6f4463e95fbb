"""Every layout, by every name: the same model, from the file that Python would take."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.projects.layouts import LAYOUTS, Layout, write
from tests.projects.project import ONE_PLAN

ROOT = Path(__file__).resolve().parents[2]
Ask = Callable[..., dict[str, Any]]

USE_IT = """
import sys
sys.path.insert(0, ".")
import auditor
from {module} import build, get_inputs, step
audit = auditor.audit(build(), get_inputs(), formats="bf16", strategies="cast", quick=True)
audit.save("by_api")
rehearsal = auditor.rehearse(step, get_inputs(), 3, remedies=False)
print(audit.recommended, audit.plans["cast_bf16"].is_verified, *rehearsal.runs)
"""


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Do a job of tests/projects/layouts.py in a process that has imported torch, and nothing of another job."""
    command = [sys.executable, "-m", "tests.projects.layouts"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def done(layout: Layout, root: Path, cwd: str, job: str, *arguments: str) -> dict[str, Any]:
            words = [job, arguments, str(root / cwd), dict(layout.env)]
            print(json.dumps(words), file=server.stdin, flush=True)
            answer: dict[str, Any] = json.loads(server.stdout.readline())
            assert "raised" not in answer, (arguments, answer["raised"])
            return answer

        yield done
        server.stdin.close()


@pytest.fixture(params=LAYOUTS)
def laid(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Layout, Path]:
    """A layout, and the folder with its files."""
    layout = LAYOUTS[request.param]
    write(layout, tmp_path / "project")
    return layout, tmp_path / "project"


def check_resolved(ask: Ask, layout: Layout, root: Path, cwd: str, target: str) -> dict[str, Any]:
    found = ask(layout, root, cwd, "resolve", target)
    assert found["act"] == layout.act, target
    assert Path(found["file"]).resolve().is_relative_to(root.resolve())
    return found


def test_the_model_is_found_by_the_last_of_the_names(laid: tuple[Layout, Path], ask: Ask) -> None:
    layout, root = laid
    check_resolved(ask, layout, root, *layout.entries[-1])


@pytest.mark.slow
def test_every_name_of_a_file_means_one_module(laid: tuple[Layout, Path], ask: Ask) -> None:
    """So that its classes are those of the user's own programs, wherever the command is typed."""
    layout, root = laid
    by_path = {entry: check_resolved(ask, layout, root, *entry) for entry in layout.entries}
    files = {Path(found["file"]).resolve() for found in by_path.values()}
    modules: dict[Path, set[str]] = {file: set() for file in files}
    for (cwd, target), found in by_path.items():
        if target.endswith(".py") or cwd == layout.script[1]:
            modules[Path(found["file"]).resolve()].add(found["module"])
    assert len(files) == len(
        {target.rpartition("/")[2].removesuffix(".py").rpartition(".")[2] for _, target in layout.entries}
    )
    assert all(names for names in modules.values())


@pytest.mark.slow
def test_command_inputs_rehearsal_and_patched_model(laid: tuple[Layout, Path], ask: Ask) -> None:
    layout, root = laid
    for number, (cwd, target) in enumerate(layout.entries):
        out = f"out{number}"
        audit = ask(layout, root, cwd, "command", f"{target}:build", *ONE_PLAN, "--out", out)
        assert audit["code"] == 0, audit["said"]
        plan = json.loads((root / cwd / out / "plan.json").read_text())
        assert plan["recommended"] == "cast_bf16", audit["said"]
        assert plan["plans"]["cast_bf16"]["verification"]["holds"], audit["said"]
        built = ask(layout, root, ".", "build", str(root / cwd / out))
        assert built == {"act": layout.act, "error": 0.0}
        words = ("--steps", "3", "--no-remedies", "--out", f"steps{number}")
        rehearsal = ask(layout, root, cwd, "command", "rehearse", f"{target}:step", *words)
        assert rehearsal["code"] == 0, rehearsal["said"]
        if target.endswith(".py"):
            more = ("--inputs", f"{target}:get_inputs", "--dry-run")
            dry = ask(layout, root, cwd, "command", f"{target}:build", *ONE_PLAN, *more)
            assert dry["code"] == 0, dry["said"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.script[0]])
def test_api(name: str, tmp_path: Path, ask: Ask) -> None:
    """A program of the user's, which imports the model as Python does, and audits and rehearses it."""
    layout = LAYOUTS[name]
    write(layout, tmp_path)
    module, cwd = layout.script
    done = ask(layout, tmp_path, cwd, "script", USE_IT.format(module=module))
    assert done["said"].split()[:3] == ["cast_bf16", "True", "fp32"]


def test_there_are_forty() -> None:
    assert len(LAYOUTS) >= 40
    assert all(layout.entries for layout in LAYOUTS.values())
