"""A choice of precisions names modules, and functions that low ones keep in FP32; the graph under it runs as the patched model."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.artefact.applying import apply_plan
from auditor.artefact.base import plan_table
from auditor.artefact.strategies import SHIPPED as STRATEGIES
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, labelled, scoped
from auditor.execution.resolve import resolve
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.operations import operation
from auditor.paths import function_in
from auditor.plan.costs import costs_of
from auditor.plan.modules import scopes_of
from auditor.plan.problem import Problem
from auditor.plan.solve import evaluate
from auditor.records import Capture, Plan, ScopeChoice, Verdict
from auditor.verify import run_patched
from tests.support.flat_models import LARGE, FlatBlock, Stack
from tests.support.problems import NOTHING, owners_of, tied_owners
from tests.support.small_models import MODELS
from tests.support.subjects import capture_of, seeded

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
KINDS = {name: model for name, model in MODELS.items() if name != "transformer"}
KINDS |= {"flat": (FlatBlock, LARGE), "stack": (Stack, LARGE)}
"""The transformer asks what dtype a kept result has, which the graph does not know."""


@cache
def small(name: str) -> tuple[nn.Module, Capture]:
    model = seeded(KINDS[name][0])
    return model, capture_of(model, *KINDS[name][1])


def test_a_function_is_fp32_where_its_module_is_or_keeps_it() -> None:
    choice = scoped({"": ScopeChoice("fp16"), "a": ScopeChoice("fp16", keep=("pow",)), "b": ScopeChoice("fp32")})
    assert choice(function_in("a", "pow")) == "fp32"
    assert choice(function_in("a", "mean")) == choice("a") == "fp16"
    assert choice(function_in("b", "mean")) == "fp32"
    assert choice.keep == {"a": {"pow"}}


def test_labels_of_functions_count_where_their_module_is_low() -> None:
    labels = {"": "bf16", function_in("", "exp"): "fp32", "a": "fp32", function_in("a", "exp"): "fp32"}
    choice = labelled(labels)
    assert choice.keep == {"": {"exp"}}
    assert (choice(""), choice("a"), choice("elsewhere")) == ("bf16", "fp32", "fp32")


def problem_of(capture: Capture, strategy: str, fmt: str) -> Problem:
    """Of operations of which nothing was measured."""
    every = [*capture.nodes, *(placeholder.name for placeholder in capture.placeholders)]
    verdicts = dict.fromkeys(capture.nodes, Verdict("safe", ""))
    return Problem(capture, costs_of(capture), dict.fromkeys(every, NOTHING), verdicts, strategy, fmt, "A100")


def drawn(name: str, strategy: str, fmt: str, rnd: random.Random) -> dict[str, str]:
    """Most modules low, some of their functions kept."""
    capture = small(name)[1]
    labels = {owner: rnd.choice([fmt, fmt, fmt, "fp32"]) for owner in owners_of(capture)}
    for group in tied_owners(capture) if strategy == "cast" else ():
        labels |= dict.fromkeys(group, labels[group[0]])
    nodes = [node for node in capture.nodes.values() if node.function is not None and not operation(node.op).cast]
    functions = {(node.owner, node.function.path) for node in nodes}
    return labels | {function_in(*found): rnd.choice([fmt, "fp32"]) for found in sorted(functions)}


class Observed:
    """Notes the dtypes of a run."""

    def __init__(self) -> None:
        self.dtypes: dict[str, str] = {}

    def __call__(self, node: fx.Node, result: Any) -> None:
        if node.op == "call_function" and isinstance(result, Tensor) and result.dtype in NAMES:
            self.dtypes[node.name] = NAMES[result.dtype]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", KINDS)
def test_the_graph_runs_as_the_patched_model(name: str, strategy: str) -> None:
    """Bit for bit, and in the dtypes that are foretold; what the one refuses, so does the other."""
    rnd, ran = random.Random(name + strategy), 0
    model, capture = small(name)
    inputs = KINDS[name][1]
    for fmt in ("fp16", "bf16"):
        problem = problem_of(capture, strategy, fmt)
        labels = drawn(name, strategy, fmt, rnd)
        scopes = scopes_of(problem, evaluate(problem, labels))
        patched = apply_plan(copy.deepcopy(model), plan_table(Plan("drawn", strategy, fmt, scopes, 0.0, 0.0, 1.0)))
        how = Policy(capture, strategy, labelled(labels), fmt)
        assert scoped(scopes).keep == labelled(labels).keep
        observed = Observed()
        interpreter = Executor(capture.graph_module, how, observed)
        try:
            with torch.no_grad():
                simulated = tensor_outputs(interpreter.run(*capture.bind(model, (inputs, {}))))
        except UnsupportedInFormat:
            with pytest.raises(Exception, match=r"dtype|together"):
                run_patched(patched, [(inputs, {})], "cpu")
            continue
        (actual,) = run_patched(patched, [(inputs, {})], "cpu")
        ran += 1
        for a, b in zip(actual, simulated, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0, equal_nan=True, msg=str(scopes))
        foretold = resolve(how).dtypes
        assert {name: foretold[name] for name in observed.dtypes} == observed.dtypes
    assert ran
