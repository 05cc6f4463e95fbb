"""Facts of toy models, put together: names, neighbours, autocast, and what a measurement adds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.records import Verdict
from auditor.rulebook.gather import gather
from tests.capturing import captured, facts_of


def test_verdicts_of_a_measurement_become_facts() -> None:
    toy = facts_of(lambda x: x.exp().sin(), torch.ones(2))
    assert (toy.facts["exp"].verdict, toy.facts["exp"].reason) == ({}, {})
    verdicts = {"exp": {"fp16": Verdict("unsafe", "overflow"), "bf16": Verdict("safe", "fine")}}
    facts = gather(toy.capture, toy.ranges, verdicts)
    assert (facts["exp"].verdict["fp16"], facts["exp"].reason["fp16"]) == ("unsafe", "overflow")
    assert (facts["exp"].verdict["bf16"], facts["exp"].reason["bf16"]) == ("safe", "fine")
    assert facts["sin"].verdict == {}


def test_what_autocast_does_to_an_operation() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        bilinear = F.bilinear(x, y, torch.ones(1, 2, 2))
        return [x @ y, x.softmax(-1), x.exp(), x.relu(), bilinear, F.binary_cross_entropy(x, y), x.sum()]

    facts = facts_of(function, torch.ones(2, 2), torch.ones(2, 2)).facts
    assert {fact.operation: fact.autocast for fact in facts.values() if fact.operation != "ones"} == {
        "matmul": "lower",
        "softmax": "fp32_unless_dtype",
        "exp": "fp32",
        "relu": "none",
        "bilinear": "promote",
        "binary_cross_entropy": "banned",
        "sum": "fp32_unless_dtype",
    }
    assert captured(nn.LSTM(2, 2), torch.ones(2, 1, 2)).facts["lstm"].autocast == "lower"


def test_neighbours_look_through_reshapes_and_casts() -> None:
    facts = facts_of(lambda x: x.softmax(-1).view(-1).float().view(2, 2) @ x.exp(), torch.ones(2, 2)).facts
    assert facts["softmax"].consumers == ("aten.matmul.default",)
    assert facts["matmul"].producers == ("aten.exp.default", "aten.softmax.int")
