"""Programs and the user's own score: what a run of the file by hand gives, in the process of its own and in this one."""

import io
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.graphs.exported import ExportedModel, save_program
from auditor.graphs.operations import Table
from auditor.graphs.stage import OperationRefused, Trial, lower_operations
from auditor.numerics.metrics import output_error
from auditor.plan.workbench import Workbench
from auditor.records import Audit, Plan
from auditor.verify import Answers, NotHandedOver, Runs, Verifier

INPUTS = torch.linspace(-2, 2, 64 * 8).reshape(64, 8).sin()


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


class Classed(nn.Module):
    """Returns a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Answer:
        hidden = torch.nn.functional.gelu(self.wide(x))
        return Answer(self.narrow(hidden), hidden)

    @classmethod
    def made(cls) -> nn.Module:
        torch.manual_seed(3)
        return cls().eval()


def near(net: nn.Module) -> Iterator[Tensor]:
    """Which samples are answered to within a thousandth of their size."""
    net.eval()
    assert next(net.parameters()).device.type == "cpu"
    with torch.no_grad():
        expected = Classed.made()(INPUTS).logits
    for x, y in zip(INPUTS.split(16), expected.split(16), strict=True):
        yield (net(x).logits.float() - y).norm(dim=1) <= 1e-3 * y.norm(dim=1)


def by_hand(audit: Audit, name: str) -> float:
    program = torch.export.load(io.BytesIO(audit.programs[f"{name}.pt2"])).module()
    expected = Classed.made()(INPUTS).logits
    with auditor.emulate("cuda"), torch.no_grad():
        return statistics.fmean(
            float(x)
            for i in range(4)
            for x in _within(program(INPUTS[16 * i :][:16])["logits"], expected[16 * i :][:16])
        )


def _within(found: Tensor, y: Tensor) -> Tensor:
    return (found.float() - y).norm(dim=1) <= 1e-3 * y.norm(dim=1)


@pytest.fixture(scope="module")
def audit() -> Audit:
    return auditor.audit(
        Classed.made(), INPUTS[:8], strategies=("autocast", "graph"), evaluate=near, max_drop=0.05, device="cpu"
    )


def test_the_score_is_what_a_run_by_hand_gives(audit: Audit) -> None:
    for name in ("graph_fp16", "graph_bf16"):
        plan = audit.plans[name]
        assert plan.is_verified
        assert plan.score.failure is None
        assert plan.score.value == by_hand(audit, name)
    assert audit.plans["graph_fp16"].score.passed
    assert not audit.plans["graph_bf16"].score.passed
    assert not audit.plans["graph_bf16"].holds


# Choices tried: what a run gives is what the same arithmetic written out gives, and what raises has its name.


def test_the_error_of_a_choice_is_that_of_the_arithmetic_written_out(
    bench: Workbench, graph: ExportedModel, table: Table, model: nn.Module
) -> None:
    trial = Trial(graph, bench)
    x, low = bench.subject.batches[0][0][0], frozenset({"linear"})
    first: Any = model.first
    with torch.no_grad():
        product = first.weight.half().float() @ x.half().float().T
        wide = torch.relu((product.T + first.bias.half().float()).half().float())
        size = ((1000 * wide) ** 2).mean(-1, keepdim=True).sqrt() / 1000
        scores = model.second(wide / (size + 0.1))
        expected = [scores, scores.softmax(-1)]
    assert trial.error(table, low) == pytest.approx(output_error(bench.reference(((x,), {})), expected), rel=0.05)
    assert trial.error(table, frozenset()) < 1e-6


def test_what_raises_in_a_run_has_its_name(bench: Workbench, graph: ExportedModel, table: Table) -> None:
    operation = table.operations["linear"]
    broken = replace(operation, literals=None, reads=("x",))
    odd = replace(table, operations={**table.operations, "linear": broken}, values={**table.values})
    values = {name: value for name, value in odd.values.items() if name != "model_first_weight"}
    with pytest.raises(OperationRefused) as caught:
        Trial(graph, bench).error(replace(odd, format="bf16", values=values), frozenset({"linear"}))
    assert caught.value.name == "linear"


def test_batches_that_the_graph_answers_otherwise_are_left_out(bench: Workbench, graph: ExportedModel) -> None:
    good = bench.subject.batches[0]
    odd = ((torch.randn(4, 17),), {})
    trial = Trial(graph, bench)
    assert trial.agrees(good)
    bench.noise.known[id(odd)] = bench.reference(good)
    assert not trial.agrees(odd)
    del bench.noise.known[id(odd)]


@pytest.mark.slow
def test_a_saved_program_answers_as_its_graph_for_any_batch(
    bench: Workbench, graph: ExportedModel, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = lower_operations(graph, table, frozenset({"linear", "linear_1"}))
    made = save_program(module, graph)
    assert made.fixed == ""
    x = torch.randn(6, 16)
    read: Any = torch.export.load(io.BytesIO(made.content)).module()
    assert all(torch.equal(read(x)[name], module(x)[name]) for name in ("scores", "likely"))

    def answered() -> Answers | str:
        return bench.ask({"mine": Plan("mine", "graph", "fp16", {})}, Runs.answers, files={"mine.pt2": made.content})[
            "mine"
        ]

    fresh = answered()

    def refused(*given: object, **named: object) -> None:
        raise NotHandedOver("no")

    monkeypatch.setattr(Verifier, "ask", refused)
    here = answered()
    assert isinstance(fresh, Answers)
    assert isinstance(here, Answers)
    assert all(torch.equal(a, b) for a, b in zip(fresh.outputs[0], here.outputs[0], strict=True))
    bench.held.close()
