"""Where loss and targets come from, in every form that is documented, and the step that is recorded with them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.errors import AuditorError, CaptureError
from auditor.features.training.objective import load_training, split, training_subject
from auditor.loading import load
from auditor.records import Capture, Subject
from auditor.training.step import LOSS, TrainingStep, capture_step, own_loss, step_batches
from tests.support.refusing import refused
from tests.support.replaying import Model

X, Y = torch.ones(4, 3), torch.zeros(4, 2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.layer(x) if bias is None else self.layer(x) + bias


class WithLoss(Pair):
    def forward(self, x: Tensor, labels: Tensor) -> Any:  # as Hugging Face models do
        y = self.layer(x)
        return SimpleNamespace(logits=y, loss=F.mse_loss(y, labels))


def whole(outputs: Tensor, batch: Any) -> Tensor:
    target = batch["labels"] if isinstance(batch, dict) else batch[-1]
    return F.mse_loss(outputs, target)


def named(outputs: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
    return weight * F.mse_loss(outputs, labels)


@pytest.mark.parametrize(
    ("loss", "batch"),
    [
        (nn.MSELoss(), (X, Y)),
        (F.mse_loss, (X, Y)),
        (named, (X, Y)),
        (named, {"x": X, "labels": Y}),
        (lambda outputs, *targets: F.mse_loss(outputs, targets[0]), (X, None, Y)),
        (lambda outputs: outputs.square().mean(), (X,)),
    ],
    ids=["module", "function", "positional", "mapping", "variadic", "no target"],
)
def test_targets_are_found_in_the_batch(loss: Callable[..., Any], batch: Any) -> None:
    model = Pair()
    subject = training_subject(model, batch, {}, loss)
    (only,) = step_batches(subject)
    assert float(TrainingStep(model, loss)(*only[0])) == pytest.approx(float(model(X).square().mean()))


def test_a_parameter_called_batch_is_given_all_of_it() -> None:
    inputs, targets = split([((X, Y), {})], whole, Pair())
    assert inputs == (((X, Y), {}),)
    assert targets[0] == (((X, Y),), {})


@pytest.mark.parametrize(
    "batch", [X, (X,), [(X,), (X,)], (X, Y), {"x": X}], ids=["tensor", "tuple", "two", "pair", "dict"]
)
def test_a_loss_of_the_batch_gets_it_in_the_form_in_which_it_was_given(batch: Any) -> None:
    given = []

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        given.append(batch)
        return outputs.square().mean()

    training_subject(Model(lambda m, x, y=None: m.layer(x), layer=nn.Linear(3, 2)), batch, {}, loss)
    first = batch[0] if isinstance(batch, list) else batch
    assert type(given[0]) is type(first)
    assert len(given[0]) == len(first)


def test_the_models_own_loss() -> None:
    subject = training_subject(WithLoss(), {"x": X, "labels": Y}, {}, None)
    assert subject.objective.source == "the model's own loss"


@pytest.mark.parametrize(
    ("model", "batch", "loss", "slug", "says"),
    [
        (Pair(), X, None, "no-loss", r"loss_fn \(--loss F.py:NAME"),
        (Pair(), X, nn.MSELoss(), "bad-targets", "target"),
        (Pair(), {"x": X}, named, "bad-targets", "'labels'"),
        (Pair(), (X, torch.zeros(9, 9)), nn.MSELoss(), "bad-loss", "must match"),
        (Pair(), (X, Y), nn.MSELoss(reduction="none"), "bad-loss", "one floating-point number"),
        (Pair(), (X, Y), lambda o, t: (o - t).log().mean() * float("nan"), "bad-loss", "nan in FP32"),
        (Pair().requires_grad_(False), (X, Y), nn.MSELoss(), "no-gradient", "unfreeze"),
    ],
    ids=["none", "no target", "no label", "shape", "not scalar", "nan", "frozen"],
)
def test_what_is_wrong_is_said_in_one_line(model: nn.Module, batch: Any, loss: Any, slug: str, says: str) -> None:
    with refused(AuditorError, slug, match=says):
        training_subject(model, batch, {}, loss)


# The loss and the targets of a TARGET, by every name that is documented.

MODEL = """
import torch
from torch import nn
model = nn.Linear(3, 2)
X, Y = torch.ones(4, 3), torch.zeros(4, 2)
def mse(y, t): return ((y - t) ** 2).mean()
"""
INPUTS = "def get_inputs(): return X\n"
TARGETS = "def get_targets(): return Y\n"


def write(folder: Path, text: str) -> str:
    file = folder / "subject.py"
    file.write_text(MODEL + text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "loss", "source"),
    [
        (INPUTS + TARGETS + "loss_fn = mse\n", None, "subject.py:loss_fn"),
        (INPUTS + TARGETS + "def get_loss(): return nn.MSELoss()\n", None, "subject.py:get_loss"),
        (INPUTS + "targets = Y\ncriterion = nn.MSELoss()\n", None, "subject.py:criterion"),
        (INPUTS + TARGETS, "mse", "--loss mse"),
        ("def get_inputs(): return X, Y\nloss_fn = mse\n", None, "subject.py:loss_fn"),
        ("def get_inputs(): return {'input': X, 't': Y}\nloss_fn = mse\n", None, "subject.py:loss_fn"),
        (INPUTS + "def loss_fn(y, batch): return mse(y, batch[:, :2] * 0)\n", None, "subject.py:loss_fn"),
        (
            "def audit_spec(): return {'model': model, 'inputs': X, 'loss': mse, 'targets': Y}\n",
            None,
            "subject.py:audit_spec",
        ),
    ],
)
def test_every_way_to_say_it(tmp_path: Path, text: str, loss: str | None, source: str) -> None:
    subject = load_training(write(tmp_path, text), loss=loss)
    assert subject.objective.source == source
    assert subject.batches[0][0] == () or subject.batches[0][0][0].shape == (4, 3)


BOXES = "def loss_fn(y, t): return sum((row - one['box']).square().mean() for row, one in zip(y, t))\n"
TWO = "def get_inputs(): return [(X,), (X,)]\n"
THREE = "def get_inputs(): return [(X,), (X,), (X,)]\n"


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        (TWO + "def get_targets(): return [Y, Y]\nloss_fn = mse\n", 2),
        (THREE + "targets = [Y, Y, Y]\nloss_fn = mse\n", 3),
        (TWO + "def get_targets(): return [(Y,), (Y,)]\nloss_fn = mse\n", 2),
        (TWO + "def get_targets(): return [{'t': Y}, {'t': Y}]\nloss_fn = mse\n", 2),
        (TWO + "targets = [(Y, 2), (Y, 3)]\ndef loss_fn(y, t, w): return w * mse(y, t)\n", 2),
        (TWO + "targets = [[{'box': t} for t in Y] for _ in range(2)]\n" + BOXES, 2),
        (INPUTS + "targets = [{'box': t} for t in Y]\n" + BOXES, 1),
        (INPUTS + "targets = [[{'box': t} for t in Y]]\n" + BOXES, 1),
        (TWO + "def loss_fn(y, t): return mse(y, t['a'])\ntargets = [{'a': Y, 'b': Y}] * 2\n", 2),
        (INPUTS + "targets = [Y]\nloss_fn = mse\n", 1),
        (TWO + "targets = (Y, Y)\nloss_fn = mse\n", 2),
        (TWO + "from torch.utils.data import DataLoader\ntargets = DataLoader([Y[0]] * 8, 4)\nloss_fn = mse\n", 2),
    ],
)
def test_targets_of_several_batches_in_every_form(tmp_path: Path, text: str, targets: int) -> None:
    assert len(load_training(write(tmp_path, text)).objective.targets) == targets


def test_a_file_with_a_loader_of_labels_serves_both_modes(tmp_path: Path) -> None:
    loader = "from torch.utils.data import DataLoader, TensorDataset\n"
    pairs = loader + "def get_inputs(): return DataLoader(TensorDataset(X, Y), 2)\nloss_fn = mse\n"
    named = "def get_inputs(): return [{'input': X, 'labels': Y}] * 2\ndef loss_fn(y, labels): return mse(y, labels)\n"
    for text in (pairs, named):
        path = write(tmp_path, text)
        training, inference = load_training(path), load(path)
        assert [len(args) + len(kwargs) for args, kwargs in training.batches] == [1, 1]
        assert [len(args) + len(kwargs) for args, kwargs in inference.batches] == [1, 1]
        assert any("taken for labels and left out" in note for note in inference.warnings)


def test_a_loss_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("def l1(y, t): return (y - t).abs().mean()\n")
    subject = load_training(write(tmp_path, INPUTS + TARGETS), loss=f"{tmp_path}/losses.py:l1")
    assert subject.objective.loss_fn.__name__ == "l1"


def test_held_out_batches_lose_their_targets_too(tmp_path: Path) -> None:
    text = "def get_inputs(): return X, Y\ndef get_eval_inputs(): return [(X, Y), (X, Y)]\nloss_fn = mse\n"
    subject = load_training(write(tmp_path, text))
    assert [len(args) for args, _ in subject.held_out] == [1, 1]


@pytest.mark.parametrize(
    ("text", "loss", "slug"),
    [
        (INPUTS + TARGETS, "nothing", "missing-loss"),
        (INPUTS + TARGETS, "elsewhere.py:f", "missing-target"),
        (INPUTS + TARGETS + "loss_fn = nn.MSELoss\n", None, "missing-loss"),
        (INPUTS + "loss_fn = mse\n", None, "bad-targets"),
        (INPUTS + "def get_targets(): return [(Y,), (Y,)]\nloss_fn = mse\n", None, "bad-targets"),
        (INPUTS + "def get_targets(): raise ValueError('x')\nloss_fn = mse\n", None, "inputs-raise"),
        (INPUTS + TARGETS + "def loss_fn(y, t): raise ValueError('no luck')\n", None, "bad-loss"),
        (INPUTS + TARGETS + "def get_loss(): raise ValueError('no luck')\n", None, "bad-loss"),
    ],
)
def test_what_is_wrong_has_a_name(tmp_path: Path, text: str, loss: str | None, slug: str) -> None:
    with refused(AuditorError, slug):
        load_training(write(tmp_path, text), loss=loss)


# A recorded training step: told in the paths that the model itself knows, the loss apart.


def net() -> nn.Module:
    layer = nn.Linear(2, 2)
    return Model(lambda m, x: m.model(x).tanh(), model=layer, tied=layer)  # `model` is a name that the step uses too


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return training_subject(net(), (torch.ones(3, 2), torch.zeros(3, 2)), {}, loss_fn)


@pytest.fixture(scope="module")
def captured(subject: Subject) -> Capture:
    return capture_step(subject, ("fp16",))


def test_owners_are_the_models_own_or_the_loss(captured: Capture) -> None:
    owners = [(node.owner, node.op.split(".")[1]) for node in captured.nodes.values()]
    assert owners == [("model", "linear"), ("", "tanh"), (LOSS, "sub"), (LOSS, "square"), (LOSS, "mean")]


def test_weights_go_by_the_names_of_the_models_state(captured: Capture, subject: Subject) -> None:
    names = {place.fqn for place in captured.placeholders if place.kind == "parameter"}
    assert names == {"model.weight", "model.bias"} <= subject.model.state_dict().keys()
    assert captured.aliases == {"model": ("tied",)}


def test_it_binds_to_the_model_and_to_batches_with_targets(captured: Capture, subject: Subject) -> None:
    values = captured.bind(subject.model, step_batches(subject)[0])
    by_name = {place.fqn or place.kind: value for place, value in zip(captured.placeholders, values, strict=True)}
    assert by_name["model.weight"] is subject.model.model.weight
    assert len(values) == 4  # weight, bias, inputs, targets


def test_one_loss_and_no_more(subject: Subject) -> None:
    both = replace(subject.objective, loss_fn=lambda outputs, targets: (outputs.sum(), targets.sum()))
    with pytest.raises(CaptureError, match="must return one loss"):
        capture_step(replace(subject, objective=both), ())


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.MSELoss(), "torch.nn.MSELoss"),
        (nn.functional.mse_loss, "torch.nn.functional.mse_loss"),
        (partial(nn.functional.huber_loss, delta=2.0), "torch.nn.functional.huber_loss"),
        (torch.dist, "torch.dist"),
    ],
)
def test_a_loss_of_torch_is_named(loss: Any, name: str) -> None:
    found = capture_step(training_subject(net(), (torch.ones(3, 2), torch.zeros(3, 2)), {}, loss), ("fp16",))
    lost = [node for node in found.nodes.values() if node.owner == LOSS]
    assert lost
    assert {(node.source, node.called_from) for node in lost} == {(None, name)}


def test_a_loss_of_ones_own_has_its_lines() -> None:
    def helper(x: Tensor) -> Tensor:
        return x.abs()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return helper(outputs - targets).mean() + nn.functional.mse_loss(outputs, targets)

    found = capture_step(training_subject(net(), (torch.ones(3, 2), torch.zeros(3, 2)), {}, loss), ("fp16",))
    here, line = Path(__file__).name, inspect.getsourcelines(loss)[1] + 1
    lost = {n.op: (n.source, n.called_from) for n in found.nodes.values() if n.owner == LOSS}
    assert lost.pop("aten.abs.default") == (f"{here}:{inspect.getsourcelines(helper)[1] + 1}", f"{here}:{line} in loss")
    assert set(lost.values()) == {(f"{here}:{line}", None)}
    assert "aten.mse_loss.default" in lost


THREE = torch.tensor(3.0)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"loss": THREE, "logits": None}, 3.0),
        (Output(THREE, torch.ones(2)), 3.0),
        (torch.tensor([[3.0]]), 3.0),
        (Output(None, torch.ones(2)), None),
        (torch.ones(2), None),
        ({"logits": THREE}, None),
    ],
)
def test_a_models_own_loss(outputs: Any, expected: float | None) -> None:
    found = own_loss(outputs)
    assert (None if found is None else found.item()) == expected
