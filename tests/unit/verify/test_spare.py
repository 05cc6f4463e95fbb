"""A process set aside before the user's code runs verifies as one that is started does, and outlives nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.verify import artefact, spare
from auditor.verify.spare import kept, taken
from tests.unit.verify.test_artefact import HEAD, PLANS, QUIET, emitted, run, scratch_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")

TELLING = """
import json
with open("../../../../seen.json", "w") as seen:
    json.dump({
        "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path[0], "own": os.getcwd() in sys.path, "stdin": sys.stdin.read(),
        "term": repr(signal.getsignal(signal.SIGTERM)), "interrupt": repr(signal.getsignal(signal.SIGINT)),
        "leader": os.getpgid(0) == os.getpid(), "grad": torch.is_grad_enabled(),
        "open": sorted(os.listdir("/proc/self/fd"), key=int)[:3],
    }, seen)
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every process that is started, and not copied."""
    found: list[Any] = []
    popen = subprocess.Popen

    def counted(command: Any, **options: Any) -> Any:
        found.append(command)
        return popen(command, **options)

    monkeypatch.setattr(artefact.subprocess, "Popen", counted)
    return found


def test_it_answers_what_a_started_process_answers(tmp_path: Path, started: list[Any]) -> None:
    expected = run(tmp_path / "started", QUIET)
    assert len(started) == 1
    with kept("cpu"):
        found = run(tmp_path / "kept", QUIET)
    assert len(started) == 1
    for name in PLANS:
        assert torch.equal(found[name].outputs[0][0], expected[name].outputs[0][0])
        assert torch.equal(found[name].graded[0], expected[name].graded[0])


def test_the_model_finds_what_it_finds_in_a_started_process(tmp_path: Path) -> None:
    def seen(folder: Path) -> dict[str, Any]:
        run(folder, QUIET + TELLING, ("cast_bf16",))
        found: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text().replace(str(folder), "here"))
        return found

    expected = seen(tmp_path / "started")
    with kept("cpu"):
        assert seen(tmp_path / "kept") == expected


def test_one_that_dies_costs_its_plan_and_another_is_started(tmp_path: Path, started: list[Any]) -> None:
    with kept("cpu"):
        dying = "def act(y):\n    if y.dtype is torch.bfloat16: os.write(2, b'the last line'); os._exit(3)\n"
        found = run(tmp_path, dying, ("cast_bf16", "cast_fp16"))
    assert "exit code 3 and no answer: the last line" in found["cast_bf16"]
    assert not isinstance(found["cast_fp16"], str)
    assert len(started) == 1


def test_it_is_taken_once_and_ends_with_the_body(tmp_path: Path) -> None:
    with kept("cpu"):
        assert spare._kept is not None
        pid = spare._kept.pid
        assert os.getpgid(pid) in (pid, os.getpgid(0))
    assert taken(tmp_path, {}) is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_was_killed_is_not_taken(tmp_path: Path, started: list[Any]) -> None:
    with kept("cpu"):
        assert spare._kept is not None
        os.kill(spare._kept.pid, signal.SIGKILL)
        while spare._kept.poll() is None:
            time.sleep(0.01)
        assert spare._kept.returncode == -signal.SIGKILL
        run(tmp_path, QUIET, ("cast_bf16",))
    assert len(started) == 1


def test_it_ends_when_who_made_it_is_killed() -> None:
    code = "import time; from auditor.verify import spare\nwith spare.kept('cpu'): print(spare._kept.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        pid = int(maker.stdout.readline())
        maker.kill()
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_none_is_kept_where_a_gpu_may_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with kept("auto"):
        assert spare._kept is None
    with kept("cpu"):
        assert spare._kept is not None


def test_the_model_is_built_in_the_copy_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(HEAD + QUIET)
    with kept("cpu"):
        (tmp_path / "net.py").write_text(HEAD.replace("manual_seed(0)", "manual_seed(1)") + QUIET)
        with artefact.Verifier([((torch.ones(2, 4),), {})], scratch_in(tmp_path)) as verifier:
            found = verifier.answers(emitted(tmp_path, ("cast_fp16",)), ["cast_fp16"])["cast_fp16"]
    torch.manual_seed(1)
    expected = torch.nn.Linear(4, 4).half()(torch.ones(2, 4).half())
    assert not isinstance(found, str)
    assert torch.allclose(found.outputs[0][0].float(), expected.float(), atol=1e-2)
