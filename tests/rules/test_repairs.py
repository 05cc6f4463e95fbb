"""Every repair repairs: it holds in the rule's format where the original fails, and is the same function in FP32."""

from __future__ import annotations

import copy
import re
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import auditor
from auditor.numerics.formats import FORMATS, dtype_of
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule
from tests.rules.examples import example

RULES = [rule for rule in load_rules() if rule.example and rule.example.fixed and rule.family != "settings"]
BUDGET = 0.01
USES = ("cast", "autocast")

BUDGETS = {
    "SFT006": 1e-3,  # bits of small probabilities go one after the other
}
"""Where less than the budget of an audit is at stake in the example: what is."""

BEYOND = {"ACT001": (torch.tensor([6.0, 12.0]),)}
"""Rules that warn of inputs beyond those of their example: inputs on which what they warn of happens."""

ELSEWHERE = {"COL001": "sums over ranks fail with many of them"}


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return [leaf for leaf in pytree.tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]


def low(model: nn.Module, inputs: tuple[Tensor, ...], fmt: str, use: str) -> list[Tensor] | str:
    """The model's outputs as a GPU would give them, under autocast or cast as a whole; or why there are none."""
    dtype = dtype_of(fmt)
    assert dtype is not None
    model = copy.deepcopy(model)
    try:
        with auditor.emulate("cuda"):
            if use == "autocast":
                with torch.autocast("cuda", dtype=dtype):
                    return outputs(model, inputs)
            cast = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
            return outputs(model.to(dtype), cast)
    except RuntimeError as error:
        return str(error)


def error(reference: list[Tensor], found: list[Tensor] | str) -> float:
    """The worst relative L2 error, or share of other results where they are discrete; infinite where there are none."""
    if isinstance(found, str):
        return float("inf")
    assert [x.shape for x in reference] == [x.shape for x in found]
    return max(_error(a, b) for a, b in zip(reference, found, strict=True))


def _error(a: Tensor, b: Tensor) -> float:
    if not a.is_floating_point():
        return float((a != b).float().mean())
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, a - b).norm()
    size = torch.where(a.isfinite(), a, 0.0).norm()
    return float(gap / size) if gap.isfinite() and size else (float("inf") if gap else 0.0)


def formats(rule: Rule) -> list[str]:
    return [name for name in rule.formats if FORMATS[name].low]


def built(rule: Rule) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """The example's model, the repaired one, and the inputs of both."""
    (broken, inputs), (fixed, _) = example(rule), example(rule, fixed=True)
    return broken, fixed, BEYOND.get(rule.code, inputs)


@pytest.mark.parametrize("rule", [rule for rule in RULES if formats(rule)], ids=lambda rule: rule.code)
def test_the_repair_holds_where_the_original_fails(rule: Rule) -> None:
    broken, fixed, inputs = built(rule)
    budget = BUDGETS.get(rule.code, BUDGET)
    truth, meant = outputs(broken, inputs), outputs(fixed, inputs)
    cases = [(fmt, use) for fmt in formats(rule) for use in USES]
    fails = [case for case in cases if not error(truth, low(broken, inputs, *case)) <= budget]
    held = {case: error(meant, low(fixed, inputs, *case)) for case in fails}
    assert {case: found for case, found in held.items() if not found <= budget} == {}
    assert fails or rule.severity == "info" or rule.code in ELSEWHERE


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_in_fp32_the_repair_is_the_same_function_or_says_what_it_changes(rule: Rule) -> None:
    assert rule.example is not None
    (broken, inputs), (fixed, _) = example(rule), example(rule, fixed=True)
    found = error(outputs(broken, inputs), outputs(fixed, inputs))
    assert (found > 1e-3) == bool(rule.example.changes), found


LAST = {
    "BND002": "the head's result is the model's",
    "LOS002": "a loss",
    "LOS003": "a loss",
}
"""Rules whose advice is to return FP32: nothing low reads it."""


class Followed(nn.Module):
    """A model with a layer behind it: in a model that is cast, that layer's weight is low, and takes nothing else."""

    def __init__(self, model: nn.Module, outputs: list[Tensor]) -> None:
        super().__init__()
        self.model = model
        sizes = [x.shape[-1] for x in outputs if x.is_floating_point() and x.dim()]
        self.readers = nn.ModuleList(nn.Linear(size, 2, bias=False) for size in sizes)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        leaves = [leaf for leaf in pytree.tree_leaves(self.model(*inputs)) if isinstance(leaf, Tensor)]
        readers = iter(self.readers)
        return [next(readers)(x) if x.is_floating_point() and x.dim() else x for x in leaves]


@pytest.mark.parametrize("rule", [rule for rule in RULES if formats(rule)], ids=lambda rule: rule.code)
def test_the_repair_runs_in_a_larger_model_under_either_strategy(rule: Rule) -> None:
    _, fixed, inputs = built(rule)
    model = fixed if rule.code in LAST else Followed(fixed, outputs(fixed, inputs))
    found = {(fmt, use): low(model, inputs, fmt, use) for fmt in formats(rule) for use in USES}
    assert {case: said for case, said in found.items() if isinstance(said, str)} == {}


def code_of(advice: str) -> list[str]:
    """The lines of code in an advice, which is one block, without what is said beside them."""
    blocks = re.findall(r"(?m)(?:^    .*\n?)+", advice + "\n")
    assert len(blocks) <= 1, blocks
    lines = textwrap.dedent("".join(blocks)).splitlines()
    return [line.partition("  #")[0].rstrip() for line in lines]


OUTSIDE = {"NRM005": "its advice is a cast of the whole model, which a test below runs"}


@pytest.mark.parametrize("rule", [rule for rule in RULES if code_of(rule.advice)], ids=lambda rule: rule.code)
def test_the_repaired_example_is_the_advice_applied(rule: Rule) -> None:
    assert rule.example is not None
    code, lines = code_of(rule.advice), rule.example.fixed.splitlines()
    indents = {len(line) - len(line.lstrip()) for line in lines}
    applied = [[" " * by + line for line in code] for by in indents]
    there = any(lines[i : i + len(code)] == block for block in applied for i in range(len(lines)))
    assert there != (rule.code in OUTSIDE)


def test_the_cast_that_spares_batch_norms_keeps_their_statistics() -> None:
    (rule,) = (rule for rule in RULES if rule.code == "NRM005")
    norm, inputs = example(rule)
    model = nn.Sequential(norm, nn.Linear(8, 8)).eval()
    truth = outputs(model, inputs)
    exec("\n".join(code_of(rule.advice)), {"model": model, "torch": torch})
    assert error(truth, low_as_it_is(model, inputs)) <= BUDGET
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.float32, torch.float16)


def low_as_it_is(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with auditor.emulate("cuda"):
        return outputs(model, tuple(x.half() for x in inputs))


@pytest.mark.parametrize("code", ["MSR001", "MSR002"])
@pytest.mark.parametrize("use", USES)
def test_the_advice_of_measured_rules_keeps_any_module(code: str, use: str) -> None:
    (rule,) = (rule for rule in load_rules() if rule.code == code)
    dtype = dtype_of(rule.formats[0])
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    with auditor.emulate("cuda"), torch.no_grad():
        if use == "cast":
            module, x = module.to(dtype).float(), x.to(dtype)
        space: dict[str, Any] = {"torch": torch, "x": x, "module": module}
        with torch.autocast("cuda", dtype=dtype, enabled=use == "autocast"):
            exec("\n".join(code_of(rule.advice)), space)
    assert space["y"].dtype is x.dtype
    assert torch.allclose(space["y"].float(), module(x.float()).to(x.dtype).float())
