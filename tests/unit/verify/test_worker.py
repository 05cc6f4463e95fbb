"""The verification process from the inside: what it imports, runs and writes, without starting one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper, save
from torch import Tensor, nn

import auditor
from auditor.artefact.emit import emit
from auditor.records import Origin, Plan, ScopeChoice, TimeAndMemory, Times
from auditor.score import ScoreResult
from auditor.stages import Stages
from auditor.verify.artefact import Verifier, read
from auditor.verify.loaders import ProgramModule, in_hand, load_program, patch_model
from auditor.verify.running import FP32, Answers, ModelRuns
from auditor.verify.worker import write
from tests.support.replaying import Model

BATCH = ((torch.ones(1, 2),), {})


def doubling(model: nn.Linear, plan: str) -> None:
    if plan == "broken":
        raise ValueError("no such scope\nand more")
    model.weight.data = 2 * model.weight.data
    model.forward = lambda x: nn.Linear.forward(model, x).half()


PATCHED: Any = SimpleNamespace(apply=doubling, PLANS={"plan": {}, "broken": {}})


def of_ones() -> nn.Linear:
    found = nn.Linear(2, 1, bias=False)
    nn.init.ones_(found.weight)
    return found


def runs(module: Any, model: nn.Module) -> ModelRuns:
    return ModelRuns(partial(patch_model, model, module.PLANS, module.apply), [BATCH], gradients=True)


def test_the_answer_is_the_patched_models_and_the_model_is_as_before() -> None:
    model = of_ones()
    found = runs(PATCHED, model).answers("plan")
    assert isinstance(found, Answers)
    assert [[(x.tolist(), x.dtype) for x in batch] for batch in found.outputs] == [[([[4.0]], torch.float16)]]
    assert found.graded[0].tolist() == [[4.0]]
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert "forward" not in vars(model)


def test_a_plan_that_cannot_be_applied_is_a_failure_in_one_line() -> None:
    model = nn.Linear(2, 1)
    assert runs(PATCHED, model).answers("broken") == "ValueError: no such scope"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "0.pt", Answers([[torch.ones(2)]], None))
    write(tmp_path / "1.pt", "it failed")
    write(
        tmp_path / "2.pt", TimeAndMemory(eager=Times(0.2, 0.1, 0.3, 9), memory=5, missing={"compiled": "no compiler"})
    )
    write(tmp_path / "3.pt", ScoreResult((1.0, 2.0), False, 2))
    assert {path.name for path in tmp_path.iterdir()} == {f"{index}.pt" for index in range(4)}  # nothing unfinished
    answer, failure, timed, given = (read(tmp_path / f"{index}.pt") for index in range(4))
    assert answer.outputs[0][0].tolist() == [1.0, 1.0]
    assert failure == "it failed"
    assert timed == TimeAndMemory(eager=Times(0.2, 0.1, 0.3, 9), memory=5, missing={"compiled": "no compiler"})
    assert given == ScoreResult((1.0, 2.0), False, 2)


SCORES = """
import torch

def weights(model):
    for _ in range(2):
        yield float(model(torch.ones(1, 2)).float())
"""


@pytest.fixture
def function(here: Path) -> Iterator[str]:
    file = here / "inner_scores.py"
    file.write_text(SCORES)
    yield f"{file}:weights"
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(file)]:
        del sys.modules[name]


def test_the_plan_is_applied_for_as_long_as_the_function_runs(function: str) -> None:
    net = of_ones()
    assert runs(PATCHED, net).score("plan", function) == ScoreResult((4.0, 4.0), False, 2)
    assert runs(PATCHED, net).score(FP32, function) == ScoreResult((2.0, 2.0), False, 2)
    assert net.weight.tolist() == [[1.0, 1.0]]


def test_what_goes_wrong_is_one_line(function: str) -> None:
    asked = runs(PATCHED, of_ones())
    assert asked.score("broken", function) == "ValueError: no such scope"
    assert "has no 'gone'" in str(asked.score(FP32, function.replace("weights", "gone")))
    more = "the function returned more numbers than the 1 in FP32: the scores cannot be paired"
    assert asked.score(FP32, function, most=1) == more


# The user's function in a process of its own: where it fails or prints, that is a line, and the next plan has its
# turn.


SCORED = """
import os, sys, time
import torch
from torch import nn

class Net(nn.Linear):
    pass

def get_model():
    torch.manual_seed(0)
    return Net(4, 4)

X = torch.linspace(-1, 1, 12).reshape(3, 4)

def means(model):
    print("on standard output")
    assert isinstance(model, Net), "the class of the model's own file"
    for x in X:
        yield model(x).float().mean() + float(open("number.txt").read())

def by_dtype(model):
    dtype = model(X).dtype
    if dtype is torch.float16:
        raise ValueError("in half")
    return 1.0

"""
LAYERS = 4 * 4 + 4


@pytest.mark.usefixtures("started")
def test_a_fresh_process_gives_what_a_run_by_hand_does_and_raising_costs_the_plan_alone(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, file = here / "scored_net.py", here / "patched_model.py"
    source.write_text(SCORED)
    (here / "number.txt").write_text("1")  # a path in the function counts from the user's directory
    names = (FP32, "autocast_fp16", "autocast_bf16")
    plans = {name: Plan("", "autocast", name[-4:], {"": ScopeChoice(name[-4:])}, 0.0, 1.0, 1.0) for name in names[1:]}
    file.write_text(emit(Origin(str(source), None, "get_model", "factory"), LAYERS, plans, None, here))
    (here / "scratch").mkdir()
    told: list[str] = []
    with Verifier([((torch.ones(1, 4),), {})], here / "scratch") as verifier:
        raised = verifier.ask(file, names[1:] + names[:1], partial(ModelRuns.score, scoring=f"{source}:by_dtype"))
        with Stages(lambda stage, detail, *_: told.append(detail))("scores", ""):
            found = verifier.ask(file, names, partial(ModelRuns.score, scoring=f"{source}:means"))
    assert str(raised["autocast_fp16"]).startswith("the function raised ValueError: in half (scored_net.py:")
    assert raised["autocast_bf16"] == raised[FP32] == ScoreResult((1.0,), True, 1)
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.linspace(-1, 1, 12).reshape(3, 4)
    with torch.no_grad():
        assert found[FP32] == ScoreResult(tuple((net(row).mean() + 1).item() for row in x), False, 3)
        for name, dtype in (("autocast_fp16", torch.float16), ("autocast_bf16", torch.bfloat16)):
            with auditor.emulate("cuda"), torch.autocast("cuda", dtype):
                assert found[name] == ScoreResult(tuple((net(row).float().mean() + 1).item() for row in x), False, 3)
    assert capfd.readouterr().out == ""
    assert Path.cwd() == Path(os.path.realpath(here))
    assert set(told) <= {"", *(f"{n}: {i}" for n in ("fp32", "autocast fp16", "autocast bf16") for i in (1, 2, 3))}


# What is run in the model's place, from the inside: programs, ONNX models, plans of models in hand.


def run(folder: Path, plan: str, x: Tensor, gradients: bool = False) -> Answers | str:
    """What the file of a plan answers."""
    return ModelRuns(partial(load_program, folder, "cpu"), [((x,), {})], gradients=gradients).answers(plan)


def test_a_model_in_hand_follows_a_plan_for_a_while_and_none_that_nobody_knows() -> None:
    model = nn.Linear(2, 2)
    plans = {"cast_bf16": Plan("cast_bf16", "cast", "bf16", {"": ScopeChoice("bf16")}, 0.0, 1.0, 1.0)}
    with in_hand(model, plans, "cast_bf16") as followed:
        assert followed is model and model.weight.dtype is torch.bfloat16
    with in_hand(model, plans, "fp32") as followed:
        assert followed is model and model.weight.dtype is torch.float32


def test_a_program_runs_as_on_a_gpu(tmp_path: Path) -> None:
    x = torch.full((1, 600), 10.0)
    weight = nn.Parameter(torch.full((600, 2), 10.0, dtype=torch.float16))
    product = Model(lambda m, x: (x.half() @ m.weight).float(), weight=weight)
    torch.export.save(torch.export.export(product, (x,)), tmp_path / "mine.pt2")
    found = run(tmp_path, "mine", x, gradients=True)
    assert isinstance(found, Answers)
    assert found.graded is not None
    assert found.outputs[0][0].tolist() == [[60000.0, 60000.0]]


def save_onnx(folder: Path, ends: int, *steps: tuple[str, dict[str, Any]]) -> None:
    """A model that does these things, one after the other, to its input."""
    ports = [helper.make_tensor_value_info(name, ends, ["n"]) for name in ("0", str(len(steps)))]
    nodes = [helper.make_node(op, [str(at)], [str(at + 1)], **how) for at, (op, how) in enumerate(steps)]
    graph = helper.make_graph(nodes, "steps", ports[:1], ports[1:])
    model: Any = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    save(model, folder / "mine.onnx")


def test_inputs_are_cast_to_what_an_onnx_model_takes_and_outputs_raised(tmp_path: Path) -> None:
    x = torch.tensor([[1.01, -2.0], [0.3, 5.0]]).T[0]  # not contiguous
    low, wide = {"to": TensorProto.BFLOAT16}, {"to": TensorProto.FLOAT}
    save_onnx(tmp_path, TensorProto.BFLOAT16, ("Cast", wide), ("Exp", {}), ("Cast", low))
    found = run(tmp_path, "mine", x)
    assert isinstance(found, Answers), found
    assert found.outputs[0][0].dtype is torch.float32
    assert torch.equal(found.outputs[0][0], x.bfloat16().float().exp().bfloat16().float())


def test_what_cannot_be_run_is_a_reason(tmp_path: Path) -> None:
    save_onnx(tmp_path, TensorProto.BFLOAT16, ("Sinh", {}))  # no kernel
    (tmp_path / "damaged.pt2").write_bytes(b"nothing of the kind")
    for name in ("mine", "damaged"):
        found = run(tmp_path, name, torch.ones(2))
        assert isinstance(found, str)
        assert "\n" not in found


class Made(nn.Module):
    """Returns what it was told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output, self.weight = output, nn.Parameter(torch.ones(2))

    def forward(self) -> Any:
        return self.output

    def train(self, mode: bool = True) -> Made:
        raise NotImplementedError("as torch's own programs")


def test_outputs_are_found_as_those_of_most_classes() -> None:
    standing = ProgramModule(Made({"logits": 1, "loss": 2}))
    found = standing.eval()()
    assert (found.logits, found["loss"], found[0], found[:2]) == (1, 2, 1, [1, 2])
    assert dict(found) == {"logits": 1, "loss": 2}
    with pytest.raises(AttributeError, match="the program has no output 'hidden', only logits, loss"):
        found.hidden  # noqa: B018
    with pytest.raises(KeyError):
        found["hidden"]
    assert len(list(standing.parameters())) == 1
    assert ProgramModule(Made((1, 2)))() == (1, 2)
