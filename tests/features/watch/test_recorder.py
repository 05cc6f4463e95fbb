"""The recorder: capsules hold the step, and the training goes on as without it."""

import copy
import logging
import os
import pickle
import random
import signal
import threading
import time
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.errors import LoadError
from auditor.features.watch import capsule as files
from auditor.features.watch.encoding import NotSaved, decode, encode
from tests.features.watch.planted import train
from tests.features.watch.plants import PLANTS, Plant, classes

Pair = namedtuple("Pair", "x y")


@dataclass
class Item:
    x: torch.Tensor
    name: str


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; NaN is equal to NaN."""
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def training(watched: bool, folder: Path, steps: int = 60, bad: int = 50, **how: Any) -> tuple[Any, ...]:
    """Weights, moments and random state after a training with a batch that is Inf; the recorder."""
    torch.manual_seed(0)
    random.seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=20)
    recorder = auditor.watch(model, optimizer, scaler, folder=folder, **how) if watched else None

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x + random.random()), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    run = step if recorder is None else recorder.step(step)
    losses = []
    for i in range(steps):
        x, y = classes(i)
        losses.append(run(x * 1e30 if i == bad else x, y).nan_to_num(7.0))
    moments = [x for state in optimizer.state.values() for x in state.values()]
    state = [*losses, *model.state_dict().values(), *moments, torch.rand(3), torch.tensor(random.random())]
    state.append(torch.tensor(scaler.get_scale()))
    return state, recorder


def test_the_training_is_bit_for_bit_as_without_a_recorder(tmp_path: Path) -> None:
    watched, recorder = training(True, tmp_path)
    plain, _ = training(False, tmp_path)
    assert recorder is not None
    assert [path.name for path in recorder.capsules] == ["step-000050-loss-not-finite"]
    assert all(map(is_same, watched, plain))


def test_a_capsule_has_the_step_before_its_forward_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states: dict[int, Any] = {}
    plant = PLANTS["a_counter_in_a_buffer"]()
    step = plant.step

    def noting(x: torch.Tensor, y: torch.Tensor) -> Any:
        states[len(states)] = copy.deepcopy(plant.model.state_dict()), torch.get_rng_state()
        return step(x, y)

    plant.step = noting
    recorder = train(plant, tmp_path)
    capsule = files.read(recorder.capsules[0])
    weights, generator = states[65]
    assert capsule.about.kind == "loss-not-finite"
    assert (capsule.about.step, len(capsule.about.signals)) == (65, 64)
    assert torch.equal(capsule.buffers["2.count"], torch.tensor(65.0))
    assert all(torch.equal(x, weights[name]) for name, x in (*capsule.weights.items(), *capsule.buffers.items()))
    assert torch.equal(capsule.calls[0].generators["torch"], generator)
    args, _ = capsule.calls[0].batch
    assert all(map(torch.equal, args, plant.batch(65)))
    ((previous,),) = capsule.previous
    assert torch.equal(previous[0][0], plant.batch(64)[0])
    assert capsule.about.code is not None
    assert capsule.about.versions["torch"] == torch.__version__
    assert torch.load(recorder.capsules[0] / "state.pt", weights_only=True)


def test_hooks_alone_know_batch_loss_and_autocast(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.inner(x), labels)}

    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = auditor.watch(model, optimizer, folder=tmp_path)
    for i in range(8):
        x, y = classes(i)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x=x * (float("nan") if i == 6 else 1.0), labels=y)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    capsule = files.read(recorder.capsules[0])
    assert (capsule.about.kind, capsule.about.step) == ("loss-not-finite", 6)
    assert not capsule.about.is_whole_step
    assert capsule.about.autocast == {"cpu": "bfloat16"}
    args, kwargs = capsule.calls[0].batch
    assert (args, [*kwargs]) == ((), ["x", "labels"])


def test_signals_go_to_the_users_log_with_one_call_a_step(tmp_path: Path) -> None:
    lines: list[tuple[int, dict[str, float]]] = []
    training(True, tmp_path, 10, 99, log=lambda values, step: lines.append((step, values)))
    assert [step for step, _ in lines] == [*range(10)]
    assert {"auditor/loss", "auditor/grad_norm", "auditor/scale", "auditor/lr", "auditor/skipped"} <= lines[3][1].keys()


def test_a_line_in_the_log_and_no_more_capsules_than_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "auditor.watch"):
        _, recorder = training(True, tmp_path, most=1)
    assert len(recorder.capsules) == 1
    assert len(caplog.records) == 1
    assert "step 50: the loss is nan; capsule in" in caplog.text


def test_a_failure_of_the_recorder_is_not_the_trainings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def log(values: Any, step: int) -> None:
        raise RuntimeError("the logger is down")

    watched, recorder = training(True, tmp_path, log=log)
    plain, _ = training(False, tmp_path)
    assert all(map(is_same, watched, plain))
    assert recorder is not None
    assert recorder.capsules == []
    assert "the logger is down" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    _, recorder = training(True, tmp_path / "file")
    assert recorder.capsules == []
    assert "no capsule could be written" in caplog.text


def test_the_models_copies_and_pickles_have_no_recorder(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    auditor.watch(model, optimizer, folder=tmp_path)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other = torch.optim.SGD(again.parameters(), 0.1)
        again(torch.full((4, 8), float("nan"))).sum().backward()
        other.step()
    assert not list(tmp_path.iterdir())


def test_close_leaves_no_hook(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    backward = torch.autograd.backward
    recorder = auditor.watch(model, optimizer, scaler, folder=tmp_path)
    recorder.close()
    assert torch.autograd.backward is backward
    assert not (model._forward_pre_hooks or optimizer._optimizer_step_pre_hooks or "step" in vars(scaler))


def test_batches_of_every_form_come_back(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    batch = {
        "pair": Pair(x, [1, 2.5, None, "text"]),
        "item": Item(x[:, 1:], "name"),
        "user": UserDict({"ids": x.int()}),
        "numpy": x.numpy(),
        "sparse": x.to_sparse(),
        3: {"size": x.shape, "dtype": torch.float16, "flags": {True}},
        "file": threading.Lock(),
    }
    path = tmp_path / "state.pt"
    torch.save(encode(((batch,), {})), path)
    ((again,), _) = decode(torch.load(path, weights_only=True))
    assert isinstance(again["pair"], Pair)
    assert again["pair"].y == [1, 2.5, None, "text"]
    assert isinstance(again["item"], Item)
    assert torch.equal(again["item"].x, x[:, 1:])
    assert isinstance(again["user"], UserDict)
    assert (again["numpy"] == x.numpy()).all()
    assert torch.equal(again["sparse"].to_dense(), x)
    assert again[3] == {"size": x.shape, "dtype": torch.float16, "flags": {True}}
    assert isinstance(again["file"], NotSaved)


def test_frozen_weights_are_a_reference_to_their_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    model[0].requires_grad_(False)
    torch.save(model.state_dict(), tmp_path / "base.pt")
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    recorder = auditor.watch(model, optimizer, folder=tmp_path / "capsules", frozen=tmp_path / "base.pt")

    @recorder.step
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    step(torch.full((2, 64), float("inf")))
    capsule = files.read(recorder.capsules[0])
    assert {*capsule.weights} == {"1.weight", "1.bias"}
    assert capsule.frozen["0.weight"][0].endswith("base.pt")
    from auditor.features.watch.weights import load_weights

    other = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    load_weights(capsule, other)
    assert torch.equal(model[0].weight, other[0].weight)
    (tmp_path / "base.pt").unlink()
    with pytest.raises(LoadError, match=r"frozen weight 0.weight came from .*base.pt, which is missing"):
        load_weights(capsule, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)))


def test_killed_while_writing_leaves_a_whole_capsule_or_none(tmp_path: Path) -> None:
    capsule = files.read(train(PLANTS["nan_input"](), tmp_path / "first").capsules[0])
    for delay in (0.0, 0.005, 0.02, 0.05):
        folder = tmp_path / f"killed-{delay}"
        child = os.fork()
        if child == 0:
            while True:
                files.write(capsule, folder, "capsule")
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in folder.glob("capsule*"):
            assert torch.equal(files.read(path).weights["1.weight"], capsule.weights["1.weight"])
        folder.mkdir(exist_ok=True)
        files.remove_drafts(folder)
        assert not list(folder.glob(".auditor*"))


def test_the_draws_of_a_forward_pass_are_recorded_on_request(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plant = PLANTS["dropout_that_drops_all"]()
    watched = train(plant, tmp_path / "with", draws=True)
    capsule = files.read(watched.capsules[0])
    names = [name for name, _ in capsule.calls[0].draws]
    torch.manual_seed(0)
    train(PLANTS["dropout_that_drops_all"](), tmp_path / "without")
    assert names == ["bernoulli_"]
    assert torch.equal(capsule.calls[0].draws[0][1].sum(-1).amin(), torch.tensor(0.0))  # all three entries of a row


@pytest.mark.parametrize("wrong", ["model", "optimizer"])
def test_other_objects_are_refused_at_once(wrong: str, tmp_path: Path) -> None:
    model: Any = net() if wrong == "optimizer" else "model"
    optimizer: Any = torch.optim.SGD(net().parameters(), 0.1) if wrong == "model" else None
    with pytest.raises(TypeError, match=r"auditor.watch needs"):
        auditor.watch(model, optimizer, folder=tmp_path)


@pytest.mark.parametrize("is_first", [True, False])
def test_compiled_models_have_no_graph_break(is_first: bool, tmp_path: Path) -> None:
    """Whether the model is compiled before it is watched, or after."""
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = auditor.watch(compiled if is_first else model, optimizer, folder=tmp_path)

    @recorder.step
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        optimizer.step()

    for i in range(4):
        x, y = classes(i)
        step(x * (float("nan") if i == 3 else 1.0), y)
    (path,) = recorder.capsules
    assert {*files.read(path).weights} == {name for name, _ in model.named_parameters()}


def test_plants_are_what_they_say() -> None:
    assert len(PLANTS) >= 30
    assert isinstance(PLANTS["nan_input"](), Plant)
