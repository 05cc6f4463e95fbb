"""Choices tried: what a run gives is what the same arithmetic written out gives, and what raises has its name."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from auditor.graphs.choices import OperationRefused, Trial, lowered
from auditor.graphs.exported import Exported, saved
from auditor.graphs.operations import Table
from auditor.numerics.metrics import output_error
from auditor.plan.workbench import Workbench
from auditor.records import Plan
from auditor.verify import Answers, NotHandedOver, Verifier


def test_the_error_of_a_choice_is_that_of_the_arithmetic_written_out(
    bench: Workbench, graph: Exported, table: Table, model: nn.Module
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


def test_what_raises_in_a_run_has_its_name(bench: Workbench, graph: Exported, table: Table) -> None:
    operation = table.operations["linear"]
    broken = replace(operation, literals=None, reads=("x",))
    odd = replace(table, operations={**table.operations, "linear": broken}, values={**table.values})
    values = {name: value for name, value in odd.values.items() if name != "model_first_weight"}
    with pytest.raises(OperationRefused) as caught:
        Trial(graph, bench).error(replace(odd, format="bf16", values=values), frozenset({"linear"}))
    assert caught.value.name == "linear"


def test_batches_that_the_graph_answers_otherwise_are_left_out(bench: Workbench, graph: Exported) -> None:
    good = bench.subject.batches[0]
    odd = ((torch.randn(4, 17),), {})
    trial = Trial(graph, bench)
    assert trial.agrees(good)
    bench.noise.known[id(odd)] = bench.reference(good)
    assert not trial.agrees(odd)
    del bench.noise.known[id(odd)]


def test_a_saved_program_answers_as_its_graph_for_any_batch(
    bench: Workbench, graph: Exported, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = lowered(graph, table, frozenset({"linear", "linear_1"}))
    made = saved(module, graph)
    assert made.fixed == ""
    x = torch.randn(6, 16)
    read: Any = torch.export.load(io.BytesIO(made.content)).module()
    assert all(torch.equal(read(x)[name], module(x)[name]) for name in ("scores", "likely"))

    def answered() -> Answers | str:
        return bench.ask(
            {"mine": Plan("mine", "graph", "fp16", {})},
            lambda verifier, folder: verifier.answers(folder, ["mine"]),
            lambda runs: {"mine": runs.answers("mine")},
            files={"mine.pt2": made.content},
        )["mine"]

    fresh = answered()

    def refused(*given: object, **named: object) -> None:
        raise NotHandedOver("no")

    monkeypatch.setattr(Verifier, "answers", refused)
    here = answered()
    assert isinstance(fresh, Answers)
    assert isinstance(here, Answers)
    assert all(torch.equal(a, b) for a, b in zip(fresh.outputs[0], here.outputs[0], strict=True))
    bench.held.close()
