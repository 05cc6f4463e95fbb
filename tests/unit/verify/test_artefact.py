"""What happens to the process that runs `patched_model.py` costs the plan it was at, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.artefact.emit import emit
from auditor.errors import LoadError
from auditor.records import Origin, Plan, ScopeChoice
from auditor.verify import Answers, NotHandedOver, Verifier, artefact, lifetime

HEAD = """
import os, signal, sys, threading, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        y = self.lin(x)
        act(y)
        return y

def get_model():
    torch.manual_seed(0)
    return Net()

"""
QUIET = "def act(y): pass\n"
LAYERS = 4 * 4 + 4
PLANS = ("autocast_fp16", "autocast_bf16", "cast_fp16", "cast_bf16")


def plan(name: str) -> Plan:
    strategy, fmt = name.split("_")
    return Plan(name, strategy, fmt, {"": ScopeChoice(fmt)}, 0.0, 1.0, 1.0)


def run(folder: Path, source: str, plans: tuple[str, ...] = PLANS, batches: Any = None, **options: Any) -> Any:
    """What the plans of a model with that source answer."""
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(HEAD + source)
    with Verifier(batches or [((torch.ones(2, 4),), {})], scratch_in(folder), **options) as verifier:
        return verifier.answers(emitted(folder, plans), list(plans))


def emitted(folder: Path, plans: tuple[str, ...]) -> Path:
    """`patched_model.py` for the model that lies in the folder."""
    origin = Origin(str(folder / "net.py"), None, "get_model", "factory")
    file = folder / "patched_model.py"
    file.write_text(emit(origin, LAYERS, {name: plan(name) for name in plans}, None, folder))
    return file


def scratch_in(folder: Path) -> Path:
    scratch = folder / "scratch"
    scratch.mkdir()
    return scratch


def in_bf16(act: str) -> str:
    """Something done where a plan in BF16 is run, and nowhere else."""
    return f"def act(y):\n    if y.dtype is torch.bfloat16:\n        {act}\n"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What every process that is started runs."""
    entries: list[str] = []

    def counted() -> Any:
        entries.append("worker")
        return lifetime.start()

    monkeypatch.setattr(artefact, "start", counted)
    return entries


def test_one_process_for_all_plans_and_every_plan_from_the_same_weights(tmp_path: Path, processes: list[str]) -> None:
    found = run(tmp_path, QUIET)
    assert len(processes) == 1
    again = {name: run(tmp_path / name, QUIET, (name,))[name] for name in PLANS}
    for name in PLANS:
        assert torch.equal(found[name].outputs[0][0], again[name].outputs[0][0])
        assert torch.equal(found[name].graded[0], again[name].graded[0])


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os._exit(7)", "exit code 7 and no answer"),
        ("sys.exit(0)", "exit code 0 and no answer"),
        (
            r"os.write(2, b'first\n\xff\xfe\x00 last\n'); os._exit(3)",
            "exit code 3 and no answer: \ufffd\ufffd\ufffd last",
        ),
    ],
    ids=["signal", "exit", "sys.exit", "bytes"],
)
def test_a_process_that_dies_costs_the_plan_it_was_at(
    act: str, said: str, tmp_path: Path, processes: list[str]
) -> None:
    found = run(tmp_path, in_bf16(act))
    for name in ("autocast_bf16", "cast_bf16"):
        assert said in found[name]
    for name in ("autocast_fp16", "cast_fp16"):
        assert isinstance(found[name], Answers)
    assert len(processes) == 2  # the second goes on after the first plan in BF16, and dies of the last


def test_files_that_come_later_are_run_in_the_process_that_is_there(tmp_path: Path, processes: list[str]) -> None:
    (tmp_path / "net.py").write_text(HEAD + QUIET + f"with open({str(tmp_path / 'built')!r}, 'a') as f: f.write('x')\n")
    with Verifier([((torch.ones(2, 4),), {})], scratch_in(tmp_path)) as verifier:
        first = verifier.answers(emitted(tmp_path, ("cast_bf16",)), ["cast_bf16"])
        later = verifier.answers(emitted(tmp_path, PLANS), PLANS)
    assert len(processes) == 1
    assert (tmp_path / "built").read_text() == "x"
    assert list(later) == list(PLANS)
    for name, other in (("cast_bf16", first), ("autocast_fp16", run(tmp_path / "alone", QUIET))):
        assert torch.equal(later[name].outputs[0][0], other[name].outputs[0][0])


def test_a_process_that_ended_between_two_files_costs_no_plan(tmp_path: Path, processes: list[str]) -> None:
    (tmp_path / "net.py").write_text(HEAD + QUIET)
    with Verifier([((torch.ones(2, 4),), {})], scratch_in(tmp_path)) as verifier:
        file = emitted(tmp_path, PLANS)
        verifier.answers(file, ["cast_bf16"])
        assert verifier._process is not None
        verifier._process.kill()
        verifier._process.wait()
        found = verifier.answers(file, PLANS)
    assert len(processes) == 2
    assert all(isinstance(found[name], Answers) for name in PLANS)


def test_the_process_ends_by_itself_when_there_is_nothing_left_to_run(tmp_path: Path) -> None:
    source = QUIET + f"import atexit\natexit.register(open, {str(tmp_path / 'ended')!r}, 'w')\n"
    run(tmp_path, source, ("cast_bf16",))
    assert (tmp_path / "ended").exists()


def test_a_plan_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "TIMEOUT", 15.0)
    found = run(tmp_path, in_bf16("time.sleep(1000)"), ("autocast_bf16", "cast_fp16"))
    assert "no answer within 15 seconds" in found["autocast_bf16"]
    assert isinstance(found["cast_fp16"], Answers)


def test_what_is_printed_is_no_answer(tmp_path: Path) -> None:
    act = r"os.write(1, b'\xff\xfe' * 40000); os.write(2, b'\x80\x00' * 40000); print('noise', flush=True)"
    found = run(tmp_path, f"def act(y):\n    {act}\n", ("cast_bf16",))
    assert isinstance(found["cast_bf16"], Answers)


def test_a_thread_left_running_keeps_nobody_waiting(tmp_path: Path) -> None:
    start = time.monotonic()
    found = run(tmp_path, "def act(y): threading.Thread(target=time.sleep, args=(300,)).start()\n", ("cast_bf16",))
    assert isinstance(found["cast_bf16"], Answers)
    assert time.monotonic() - start < 100


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('gone')", "OSError: gone"),
        ("os._exit(5)", "exit code 5"),
        ("sys.exit('no')", "SystemExit: no"),
    ],
)
def test_a_source_that_cannot_be_imported_is_an_error(
    source: str, said: str, tmp_path: Path, processes: list[str]
) -> None:
    with pytest.raises(LoadError, match=re.escape(said)) as caught:
        run(tmp_path, source)
    assert caught.value.slug == "not-rebuilt"
    assert len(processes) == 1


BUILT = [
    ("def act(y): raise OSError('no data')", r"running the model in FP32 .* OSError: no data \(net\.py:20\)"),
    (
        "def act(y): pass\ndef get_model(): return open('nothing')",
        r"building the model .* FileNotFoundError.*net\.py:21",
    ),
]


@pytest.mark.parametrize(("source", "said"), BUILT)
def test_a_model_that_does_not_run_in_fp32_is_an_error(source: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=said):
        run(tmp_path, source)


def test_another_model_is_no_answer_of_a_plan(tmp_path: Path) -> None:
    with pytest.raises(NotHandedOver, match="the factory makes another model each time"):
        run(tmp_path, QUIET, expected=[torch.ones(2, 4)])
    right = run(tmp_path / "again", QUIET, ("cast_bf16",), gradients=False)["cast_bf16"].outputs[0]
    found = run(tmp_path / "right", QUIET, ("cast_fp16",), expected=[x.float() for x in right], noise=0.01)
    assert isinstance(found["cast_fp16"], Answers)


def test_a_source_that_looks_at_its_arguments_finds_none(tmp_path: Path) -> None:
    found = run(tmp_path, QUIET + "import argparse\nargparse.ArgumentParser().parse_args()\n", ("cast_bf16",))
    assert isinstance(found["cast_bf16"], Answers)


def test_numbers_drawn_at_import_do_not_move_those_drawn_by_the_factory(tmp_path: Path) -> None:
    from auditor.isolation.process import reseed

    source = QUIET + "torch.rand(3)\ndef get_model(): return Net()\n"
    found = run(tmp_path, source, ("cast_bf16",), seed=3)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        reseed(3)
        layer = torch.nn.Linear(4, 4).bfloat16()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float()).bfloat16()
    assert torch.equal(found["cast_bf16"].outputs[0][0], expected.detach())


class Local:
    """A class that no other process can import by the name it is given."""


def test_inputs_that_no_other_process_can_read(tmp_path: Path) -> None:
    with pytest.raises(NotHandedOver):
        run(tmp_path, QUIET, batches=[((torch.ones(2, 4), lambda: None), {})])
    Local.__module__ = "nowhere"
    sys.modules["nowhere"] = sys.modules[__name__]
    try:
        with pytest.raises(NotHandedOver):
            run(tmp_path / "again", QUIET, batches=[((Local(),), {})])
    finally:
        del sys.modules["nowhere"]


def test_a_model_that_cannot_run_with_gradients_is_not_asked_to(tmp_path: Path) -> None:
    source = "def act(y):\n    if torch.is_grad_enabled(): raise RuntimeError('no gradients here')\n"
    found = run(tmp_path, source, ("cast_bf16",))
    assert found["cast_bf16"] == "with gradients enabled, RuntimeError: no gradients here (net.py:21)"
    found = run(tmp_path / "again", source, ("cast_bf16",), gradients=False)
    assert found["cast_bf16"].graded is None


PARENT = """
import signal, sys, tempfile
from pathlib import Path
from auditor.verify import Verifier, unwound
import torch

with (
    unwound(),
    tempfile.TemporaryDirectory() as scratch,
    Verifier([((torch.ones(2, 4),), {})], Path(scratch)) as verifier,
):
    verifier.answers(Path(sys.argv[1]), ["cast_bf16"])
"""


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has asked after does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def heard() -> None:
    """What a shell runs in the background inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, -signal.SIGINT)],
)
def test_neither_process_nor_file_is_left_behind(number: int, code: int, root: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        HEAD + f"def act(y):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    time.sleep(300)\n"
    )
    origin = Origin(str(tmp_path / "net.py"), None, "get_model", "factory")
    file, temporary = tmp_path / "patched_model.py", tmp_path / "tmp"
    file.write_text(emit(origin, LAYERS, {"cast_bf16": plan("cast_bf16")}, None, tmp_path))
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PARENT, str(file)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=heard)
    until = time.monotonic() + 120
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    worker = int((tmp_path / "pid").read_text())
    assert alive(worker)
    parent.send_signal(number)
    assert parent.wait(timeout=120) == code
    while (alive(worker) or list(temporary.iterdir())) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(worker)
    assert list(temporary.iterdir()) == []
