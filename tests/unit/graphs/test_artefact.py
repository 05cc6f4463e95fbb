"""Programs as files: what is saved is read again and answers the same, in this process and in another."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from auditor.graphs import stage
from auditor.graphs.choices import lowered
from auditor.graphs.exported import Exported, saved
from auditor.graphs.operations import Table
from auditor.plan.workbench import Workbench
from auditor.records import Plan
from auditor.verify import Answers, NotHandedOver, Verifier


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
        return stage.run_as_files(
            bench,
            {"mine.pt2": made.content},
            {"mine": Plan("mine", "graph", "fp16", {})},
            lambda verifier, folder: verifier.answers(folder, ["mine"]),
            lambda runs: {"mine": runs.answers("mine")},
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
