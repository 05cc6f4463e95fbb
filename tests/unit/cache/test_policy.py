"""Policies that ask the same of every operation are alike, and no others."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from auditor.cache.policy import told
from auditor.loading import from_object, in_eval
from auditor.records import Literals
from auditor.replay.running import Running, Setting
from auditor.tape import capture


def test_each_thing_that_a_run_asks_tells_policies_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with in_eval(model):
        captured = capture(from_object(model, torch.ones(2, 4)), ("fp16",))
    last = list(captured.nodes)[-1]
    weight = captured.placeholders[0].name

    def policy(name: str = "", **asked: object) -> Running:
        return Running(lambda node: Setting("fp16" if node == name else "fp32", autocast=True), **asked)

    policies = [
        policy(),
        policy(last),
        policy(next(iter(captured.nodes))),
        policy(last, placeholder_precision={weight: "fp16"}),
        policy(last, literals={last: Literals({1: 2.0})}),
        policy(last, crossing=lambda source, reader: ("fp16",) if reader == last else ()),
    ]
    found = [told(captured, each) for each in policies]
    assert [pair for pair in itertools.combinations(found, 2) if pair[0] == pair[1]] == []
    assert told(captured, policy(last)) == found[1]
    assert told(captured, policy(last, literals={last: Literals({1: object()})})) is None
