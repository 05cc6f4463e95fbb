"""What happens to the process that runs `patched_model.py` costs the plan it was at, and nothing else."""

import os
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
from auditor.isolation.process import reseed
from auditor.records import Origin, Plan, ScopeChoice
from auditor.verify import artefact
from auditor.verify.artefact import NotHandedOver, Verifier
from auditor.verify.running import Answers
from tests.support.refusing import refused
from tests.support.thinned import thinned

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
        act(str(y.dtype), str(self.lin.weight.dtype))
        return y

def get_model():
    torch.manual_seed(0)
    return Net()

"""
QUIET = "def act(*seen): pass\n"
LAYERS = 4 * 4 + 4
PLANS = ("autocast_fp16", "cast_fp16", "cast_bf16")


def plan(name: str) -> Plan:
    strategy, fmt = name.split("_")
    return Plan(name, strategy, fmt, {"": ScopeChoice(fmt)}, 0.0, 1.0, 1.0)


def verifier_of(folder: Path, source: str, batches: Any = None, **options: Any) -> Verifier:
    """For a model with that source, which lies in the folder."""
    (folder / "scratch").mkdir(parents=True)
    (folder / "net.py").write_text(HEAD + source)
    return Verifier(batches or [((torch.ones(2, 4),), {})], folder / "scratch", **options)


def emitted(folder: Path, *plans: str) -> Path:
    """`patched_model.py` for the model that lies in the folder."""
    origin = Origin(str(folder / "net.py"), None, "get_model", "factory")
    file = folder / "patched_model.py"
    file.write_text(emit(origin, LAYERS, {name: plan(name) for name in plans}, None, folder))
    return file


def run(folder: Path, source: str, *plans: str, **options: Any) -> Any:
    """What the plans of a model with that source answer."""
    with verifier_of(folder, source, **options) as verifier:
        return verifier.ask(emitted(folder, *plans), list(plans))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What every process that is started runs."""
    entries: list[str] = []
    start = artefact.start

    def counted() -> Any:
        entries.append("worker")
        return start()

    monkeypatch.setattr(artefact, "start", counted)
    return entries


@pytest.mark.usefixtures("started")
def test_one_process_builds_one_model_for_all_files_and_ends_by_itself(tmp_path: Path, processes: list[str]) -> None:
    note = f"def note(what): open({str(tmp_path / 'notes')!r}, 'a').write(what)\n"
    with verifier_of(
        tmp_path, f"{QUIET}{note}import atexit\nnote('built ')\natexit.register(note, 'ended')\n"
    ) as verifier:
        alone = verifier.ask(emitted(tmp_path, "cast_bf16"), ["cast_bf16"])
        found = verifier.ask(emitted(tmp_path, *PLANS), PLANS)
        back = verifier.ask(emitted(tmp_path, *PLANS), PLANS[::-1])
    assert len(processes) == 1
    assert (tmp_path / "notes").read_text() == "built ended"
    assert list(found) == list(PLANS)
    for other in (alone, back):  # every plan begins with the same weights
        for name, answers in other.items():
            assert torch.equal(answers.outputs[0][0], found[name].outputs[0][0])
            assert torch.equal(answers.graded[0], found[name].graded[0])


@pytest.mark.slow
@pytest.mark.usefixtures("started")
def test_a_process_that_dies_costs_the_plan_it_was_at(tmp_path: Path, processes: list[str]) -> None:
    deaths = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    deaths += """
def act(*seen):
    if seen == ("torch.float16", "torch.float32"): os.kill(os.getpid(), signal.SIGSEGV)
    if seen == ("torch.float16", "torch.float16"):
        os.write(2, b'first\\n\\xff\\xfe\\x00 last\\n')
        os._exit(3)
"""
    with verifier_of(tmp_path, deaths) as verifier:
        found = verifier.ask(file := emitted(tmp_path, *PLANS), PLANS)
        assert len(processes) == 3  # another one goes on after each that died
        worker = int((tmp_path / "pid").read_text())
        os.kill(worker, signal.SIGKILL)
        while alive(worker):
            time.sleep(0.05)
        again = verifier.ask(file, ["cast_bf16"])
    ended = "not run, the process that ran the plan"
    assert [found[name] for name in PLANS[:2]] == [
        f"{ended} was killed by SIGSEGV",
        f"{ended} ended with exit code 3 without a result: \ufffd\ufffd\\x00 last",
    ]
    assert torch.equal(again["cast_bf16"].outputs[0][0], found["cast_bf16"].outputs[0][0])
    assert len(processes) == 4


@pytest.mark.usefixtures("started")
def test_a_plan_that_hangs_is_given_up(tmp_path: Path) -> None:
    with verifier_of(tmp_path, "def act(y, w):\n    if y == 'torch.bfloat16': time.sleep(1000)\n") as verifier:
        verifier.ask(emitted(tmp_path, *PLANS), ["cast_fp16"])
        verifier.timeout = 0.5
        found = verifier.ask(emitted(tmp_path, *PLANS), ["cast_bf16"])
    assert found == {"cast_bf16": "not run, the process that ran the plan did not respond within 0.5 seconds"}


@pytest.mark.usefixtures("started")
def test_neither_noise_nor_threads_nor_arguments_nor_numbers_drawn_at_import_matter(tmp_path: Path) -> None:
    source = r"""
import argparse
argparse.ArgumentParser().parse_args()
torch.rand(3)
def act(*seen):
    os.write(1, b'\xff\xfe' * 40000); os.write(2, b'\x80\x00' * 40000); print('noise', flush=True)
    threading.Thread(target=time.sleep, args=(300,)).start()
def get_model(): return Net()
"""
    start = time.monotonic()
    found = run(tmp_path, source, "cast_bf16", seed=3)
    assert time.monotonic() - start < 100
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        reseed(3)
        layer = torch.nn.Linear(4, 4).bfloat16()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float()).bfloat16()
    assert torch.equal(found["cast_bf16"].outputs[0][0], expected.detach())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("os._exit(5)", r"exit code 5"),
        ("def act(*y): raise OSError('gone')", r"running the model in FP32 .* OSError: gone \(net\.py:20\)"),
    ],
)
def test_no_model_or_no_run_in_fp32_is_an_error(source: str, said: str, tmp_path: Path, processes: list[str]) -> None:
    with refused(LoadError, "not-rebuilt", match=said):
        run(tmp_path, source, *PLANS)
    assert len(processes) == 1


def test_another_model_is_no_answer_of_a_plan(tmp_path: Path) -> None:
    with pytest.raises(NotHandedOver, match="the factory returns a different model each time"):
        run(tmp_path / "other", QUIET, "cast_bf16", expected=[torch.ones(2, 4)])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        right = torch.nn.Linear(4, 4)(torch.ones(2, 4))
    found = run(tmp_path / "right", QUIET, "cast_fp16", expected=[right * 1.01], noise=0.01)
    assert isinstance(found["cast_fp16"], Answers)


class Local:
    """A class that no other process can import by the name it is given."""


@pytest.mark.parametrize("said", ["loaded in another process", "pickled"])
def test_inputs_that_no_other_process_has(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "__module__", "nowhere")
    monkeypatch.setitem(sys.modules, "nowhere", sys.modules[__name__])
    given = (lambda: None) if said == "pickled" else Local()
    with pytest.raises(NotHandedOver, match=f"the inputs cannot be {said}"):
        run(tmp_path, QUIET, "cast_bf16", batches=[((given,), {})])


PARENT = """
import signal, sys, tempfile
from pathlib import Path
from auditor.verify.artefact import Verifier
import torch

with (
    tempfile.TemporaryDirectory() as scratch,
    Verifier([((torch.ones(2, 4),), {})], Path(scratch)) as verifier,
):
    verifier.ask(Path(sys.argv[1]), ["cast_bf16"])
"""


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has asked after does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("number", thinned([signal.SIGTERM, signal.SIGKILL]))
def test_neither_process_nor_file_is_left_behind(number: int, root: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        HEAD + f"def act(*y):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    time.sleep(300)\n"
    )
    file, temporary = emitted(tmp_path, "cast_bf16"), tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PARENT, str(file)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    worker = int((tmp_path / "pid").read_text())
    assert alive(worker)
    parent.send_signal(number)
    assert parent.wait(timeout=120) == -number
    while (alive(worker) or list(temporary.iterdir())) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(worker)
    assert list(temporary.iterdir()) == []
