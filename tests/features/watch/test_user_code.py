"""Trainings as users write them: recorded without a change of theirs, and replayed to the right line."""

import copy
import itertools
import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.features.watch import capsule as files
from auditor.features.watch.encoding import NotSaved, decode, encode, over_batch, tensors_of
from auditor.features.watch.facts import facts_of
from auditor.features.watch.generators import state_of_process
from auditor.features.watch.recorder import inert_recorders
from auditor.features.watch.replay import replay
from tests.features.watch import habits
from tests.features.watch.habits import HABITS, Item
from tests.features.watch.planted import is_named, replayed
from tests.features.watch.plants import classes, lines_of, mlp

QUICK = ("a_teacher_that_follows", "a_method_as_step", "a_dataclass_of_lists_that_is_written_to")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HABITS]
)
def test_a_failure_is_reproduced_and_named(name: str, tmp_path: Path) -> None:
    recorder, result = replayed(name, tmp_path, HABITS)
    assert not files.read(recorder.capsules[0]).about.changed
    assert result.about.kind in HABITS[name]().kinds
    assert result.is_reproduced, result.verdict
    assert is_named(result, lines_of(name, habits.__file__)), result.verdict


@pytest.mark.parametrize("name", HABITS)
def test_the_training_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """Weights after the step that fails, and the random state."""
    states = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        plant = HABITS[name]()
        step = plant.step
        if is_watched:
            step = auditor.watch(plant.model, plant.optimizer, folder=tmp_path).step(step)
        for i in range(plant.at + 2):
            step(*plant.batch(i))
        states.append([*(p.detach().nan_to_num(7.0) for p in plant.model.parameters()), torch.rand(2)])
    assert all(map(torch.equal, *states))
    assert list(tmp_path.iterdir())


def watched(folder: Path, **how: Any) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, auditor.watch(model, optimizer, folder=folder, **how)


def test_an_interruption_ends_the_call_and_is_no_failure(tmp_path: Path) -> None:
    model, optimizer, recorder = watched(tmp_path)

    @recorder.step
    def step(i: int) -> None:
        x, y = classes(i)
        loss = F.cross_entropy(model(x * (float("nan") if i == 5 else 1.0)), y)
        if i == 3:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for i in range(6):
        try:
            step(i)
        except KeyboardInterrupt:
            assert i == 3
    (path,) = recorder.capsules
    (call,) = files.read(path).calls
    assert call.batch[0] == (5,)


def test_two_recorders_in_one_folder_with_models_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its capsule, and the replay of each finds its own model."""
    monkeypatch.setattr("auditor.features.watch.recorder._orders", itertools.count())

    def pair() -> Any:
        torch.manual_seed(0)
        first, second = mlp(), mlp()
        return first, second, torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)

    def step_of(first: Any, second: Any, one: Any, other: Any) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            for model, optimizer in ((first, one), (second, other)):
                optimizer.zero_grad()
                F.cross_entropy(model(x / x.norm(dim=-1, keepdim=True)), y).backward()
                optimizer.step()

        return step

    first, second, one, other = pair()
    recorders = [auditor.watch(first, one, folder=tmp_path), auditor.watch(second, other, folder=tmp_path)]
    run = step_of(first, second, one, other)
    for recorder in recorders:
        run = recorder.step(run)
    for i in range(4):
        x, y = classes(i)
        run(x * (i != 3), y)
    assert [len(recorder.capsules) for recorder in recorders] == [1, 1]
    assert len(list(tmp_path.iterdir())) == 2
    capsules = [files.read(recorder.capsules[0]) for recorder in recorders]
    again = pair()
    with inert_recorders() as made:
        auditor.watch(again[0], again[2])
        auditor.watch(again[1], again[3])
    result = replay(recorders[0].capsules[0], step_of(*again), "step", made)
    assert result.is_reproduced
    assert torch.equal(again[0][0].weight, capsules[0].weights["0.weight"])
    assert torch.equal(again[1][0].weight, capsules[1].weights["0.weight"])


def test_scalers_can_be_copied_and_pickled(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scale = torch.amp.GradScaler.scale
    recorder = auditor.watch(model, optimizer, scaler, folder=tmp_path)
    for again in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        again._init_scale = 2.0
        assert float(again.scale(torch.ones(()))) in (2.0, 8.0)
    assert float(scaler.scale(torch.ones(()))) == 8.0
    recorder.close()
    assert torch.amp.GradScaler.scale is scale


def test_models_whose_tensors_are_unusual_do_not_end_the_recording(tmp_path: Path) -> None:
    """Lazy, complex, double, empty and BF16 parameters, and one without a gradient."""

    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(4)
            self.norm = nn.LazyBatchNorm1d()
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.short = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            self.empty = nn.Parameter(torch.ones(0, 4))
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.lazy(x)) * self.phase.abs() * self.wide * self.short
            return h.float() + self.empty.sum()

    model = Unusual()
    recorder = auditor.watch(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), folder=tmp_path)
    model(classes(0)[0])
    recorder.close()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = auditor.watch(model, optimizer, folder=tmp_path)

    @recorder.step
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for i in range(9):
        x, y = classes(i)
        step(x * (float("inf") if i == 8 else 1.0), y)
    assert not recorder.is_off
    (path,) = recorder.capsules
    assert files.read(path).about.step == 8


def test_batches_of_objects_have_ends_and_all_their_tensors() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x = torch.ones(2)
            self.inner = {"edges": [torch.zeros(3)]}
            self.itself = self

    graph = Graph()
    item = Item([torch.ones(1), torch.ones(2)], ["a"], torch.ones(3))
    batch = ((graph, item, iter([torch.ones(1)])), {"loader": torch.utils.data.DataLoader([torch.ones(5)])})
    assert [x.numel() for x in tensors_of(batch)] == [2, 3, 1, 2, 3]
    again = over_batch(torch.clone, batch)
    assert all(one is not other for one, other in zip(tensors_of(batch), tensors_of(again), strict=True))
    assert torch.equal(graph.x, again[0][0].x)
    (saved, *_), others = decode(encode(batch))
    kept = saved if isinstance(saved, dict) else vars(saved)
    assert torch.equal(kept["inner"]["edges"][0], torch.zeros(3))
    assert isinstance(kept["itself"], NotSaved)
    assert isinstance(others["loader"], NotSaved)


def test_an_iterator_of_batches_is_named_as_missing(tmp_path: Path) -> None:
    model, optimizer, recorder = watched(tmp_path)

    def step(batches: Any) -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    run = recorder.step(step)
    x, y = classes(0)
    run(iter([(x * float("nan"), y)]))
    capsule = files.read(recorder.capsules[0])
    assert next(facts_of(capsule, step)).startswith("Argument 0 is not in the capsule (<list_iterator")


def test_the_state_of_numpys_generator_is_the_present_one() -> None:
    """Also if a draw leaves its words as they were, and takes the second number of a pair."""
    np.random.seed(3)
    for draw in (lambda: None, np.random.randn, np.random.randn, np.random.rand, lambda: np.random.seed(5)):
        draw()
        state, expected = state_of_process()["numpy"], np.random.get_state()
        assert (state[1] == expected[1]).all()
        assert state[2:] == expected[2:]


def test_the_state_of_pythons_generator_is_the_present_one() -> None:
    """And is read anew only after a draw, or while the second number of a pair is left."""
    random.seed(3)
    for draw in (
        lambda: None,
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),
        random.random,
        lambda: random.seed(5),
    ):
        draw()
        assert state_of_process()["python"] == random.getstate()
    assert state_of_process()["python"] is state_of_process()["python"]


def test_graphs_of_earlier_steps_are_not_kept(tmp_path: Path) -> None:
    """Hooks alone: the model's argument has a graph, which ends with its step."""
    model, optimizer, recorder = watched(tmp_path, draws=True)
    encoder = nn.Linear(8, 8)
    nodes = []
    for i in range(3):
        h = encoder(classes(i)[0])
        nodes.append(h)
        model(h).sum().backward()
        optimizer.step()
    kept = [call for calls in recorder._earlier for call in calls]
    assert kept
    assert not any(x.requires_grad for call in kept for x in tensors_of([call.batch, call.inputs]))


def test_a_full_disk_is_a_line_in_the_log(tmp_path: Path) -> None:
    """In a process whose files may have 1 KiB."""
    code = f"""
import logging, resource, torch, auditor
logging.basicConfig()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
recorder = auditor.watch(model, optimizer, folder={str(tmp_path / "capsules")!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
def step(x):
    model(x).sum().backward()
    optimizer.step()
run = recorder.step(step)
run(torch.full((2, 64), float("nan")))
run(torch.ones(2, 64))
print("trained on", recorder.is_off)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "trained on False" in done.stdout, done.stderr
    assert "no capsule could be written" in done.stderr
    assert not list((tmp_path / "capsules").iterdir())


SCRIPT = """import argparse
from typing import NamedTuple
import torch
from torch import nn
import auditor


class Batch(NamedTuple):
    x: torch.Tensor
    names: list


parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Linear(args.width, 1)


def make(kind="sgd"):
    return {"sgd": torch.optim.SGD}[kind](model.parameters(), lr=0.1)


optimizer = make()
recorder = auditor.watch(model, optimizer)


@recorder.step
def step(batch):
    optimizer.zero_grad()
    loss = (model(batch.x) / batch.x.sum()).square().mean()
    loss.backward()
    optimizer.step()
    return loss


if __name__ == "__main__":
    for i in range(4):
        step(Batch(torch.ones(2, args.width) * (i != 3), ["some"]))
"""


def test_a_script_with_arguments_is_replayed_on_another_machine(tmp_path: Path) -> None:
    """The capsule lies beside a copy of the script, to which a line was added."""
    cluster, laptop = tmp_path / "cluster", tmp_path / "laptop"
    cluster.mkdir()
    (cluster / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "-W", "ignore", "train.py", "--width", "6"], check=True, cwd=cluster)
    shutil.copytree(cluster / "capsules", laptop / "capsules")
    (laptop / "train.py").write_text(f"# a line\n{SCRIPT}")
    shutil.rmtree(cluster)
    (name,) = [one.name for one in (laptop / "capsules").iterdir()]
    words = ["-m", "auditor", "replay", f"laptop/capsules/{name}", "--out", "out", "--quiet"]
    subprocess.run([sys.executable, *words], check=True, cwd=tmp_path)
    data = json.loads((tmp_path / "out/replay.json").read_text())
    line = 1 + next(i for i, text in enumerate(SCRIPT.splitlines(), 1) if "batch.x.sum()" in text)
    assert data["is_reproduced"]
    assert data["culprit"]["line"] == f"train.py:{line}"
    assert any("train.py is not as it was in the training" in fact for fact in data["facts"])


def test_a_compiled_update_does_not_break(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model, optimizer, recorder = watched(tmp_path)
    update = torch.compile(optimizer.step, backend="eager")

    @recorder.step
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        update()

    for i in range(3):
        step(*classes(i))
    assert not recorder.is_off
