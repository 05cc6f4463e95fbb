"""Formulas are found however they are spelled, once each, and not where the author computes them in FP32."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from tests.rules.examples import Side
from tests.rules.spellings import FORMULAS, Step, spelled, spellings
from tests.support.capturing import Function, captured

RULES = tuple(rule for rule in load_rules() if rule.code in {code for code, _, _ in FORMULAS.values()})
X = torch.linspace(-1, 1, 16).reshape(4, 4)
SAMPLE = 3


def found(functions: dict[str, Step]) -> dict[str, list[str]]:
    """Codes that fire on each function, all of them captured side by side."""
    toy = captured(Side([(name, Function(function), 1) for name, function in functions.items()]), *[X] * len(functions))
    codes: dict[str, list[str]] = {name: [] for name in functions}
    for finding in classify(toy.capture, toy.facts, RULES):
        codes[finding.owner].append(finding.rule)
    return codes


def key(name: str, mixture: tuple[int, ...]) -> str:
    return "_".join([name, *map(str, mixture)])


def test_some_spellings_of_every_formula() -> None:
    """A sample that stays the same; the slow test below draws many more."""
    chooser = random.Random(0)
    drawn = {name: chooser.sample(list(spellings(name)), SAMPLE) for name in FORMULAS}
    functions = {key(name, mixture): spelled(name, mixture) for name in drawn for mixture in drawn[name]}
    expected = {key(name, mixture): [FORMULAS[name][0]] for name in drawn for mixture in drawn[name]}
    assert found(functions) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_many_spellings(name: str, data: st.DataObject) -> None:
    every = list(spellings(name))
    count = min(20, len(every))
    mixtures = data.draw(st.lists(st.sampled_from(every), min_size=count, max_size=count, unique=True))
    functions = {key(name, mixture): spelled(name, mixture) for mixture in mixtures}
    assert found(functions) == {key(name, mixture): [FORMULAS[name][0]] for mixture in mixtures}
