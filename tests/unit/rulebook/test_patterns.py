"""Where a rule's match applies: patterns of operations, and chains found in a graph."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from auditor.rulebook.conditions import Condition
from auditor.rulebook.load import load_rules
from auditor.rulebook.patterns import Matcher
from auditor.rulebook.rule import Chain, ChainNode, Match
from tests.support.capturing import Function, captured
from tests.support.rule_files import CHAIN, RULE, write


def found(tmp_path: Path, function: object) -> set[str]:
    write(tmp_path, RULE.split("[match]")[0] + CHAIN)
    (rule,) = load_rules([tmp_path])
    toy = captured(Function(function), torch.ones(4, 4))  # type: ignore[arg-type]
    return Matcher(toy.capture, toy.facts).find(rule.match)


def test_a_chain_is_found_with_and_without_its_optional_node(tmp_path: Path) -> None:
    assert found(tmp_path, lambda x: (x.exp().sum(), (-x.cos().exp()).sum())) == {"exp", "exp_1"}


def test_a_chain_looks_through_reshapes_and_casts(tmp_path: Path) -> None:
    assert found(tmp_path, lambda x: x.exp().view(2, 8).transpose(0, 1).double().sum()) == {"exp"}


def test_everything_a_match_says_must_hold() -> None:
    toy = captured(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4))
    matcher = Matcher(toy.capture, toy.facts)
    assert matcher.find(Match(ops=("aten.linear",))) == {"linear", "linear_1"}
    assert matcher.find(Match(ops=("aten.linear",), position="first")) == {"linear"}
    assert matcher.find(Match(position="last")) == {"linear_1"}
    assert matcher.find(Match(owner_type="T*")) == {"tanh"}
    assert matcher.find(Match(ops=("aten.linear",), owner_type="T*")) == set()


def test_a_role_that_any_operation_plays_is_played_by_inputs_too() -> None:
    # x stands at the head of both paths and is no operation; in the second chain the two roles must be two values.
    toy = captured(Function(lambda x: x.exp() * x), torch.ones(2))
    nodes = {"x": ChainNode(("*",)), "exp": ChainNode(("aten.exp",)), "product": ChainNode(("aten.mul",))}
    both = Match(nodes=nodes, chains=(Chain(("x > exp > product", "x > product"), "product"),))
    assert Matcher(toy.capture, toy.facts).find(both) == {"mul"}
    squared = captured(Function(lambda x: x.exp() * x.exp()), torch.ones(2))
    assert Matcher(squared.capture, squared.facts).find(both) == set()


def test_a_condition_on_a_role_is_asked_of_the_node_that_plays_it() -> None:
    toy = captured(Function(lambda x: (x.exp() + 1.0, x.sin() + 2.0)), torch.ones(2))
    two = ChainNode(("aten.add",), Condition("fact", "constant_max_abs", {"equals": 2}))
    match = Match(nodes={"wave": ChainNode(("aten.*",)), "shift": two}, chains=(Chain(("wave > shift",), "wave"),))
    assert Matcher(toy.capture, toy.facts).find(match) == {"sin"}
