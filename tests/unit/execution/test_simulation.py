"""The graph that is simulated under a plan and the model that is patched to follow it give the same bits."""

import copy
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from auditor.artefact.applying import apply_plan
from auditor.artefact.base import plan_table
from auditor.artefact.strategies import SHIPPED as STRATEGIES
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, choice_from_scopes, choice_keeping
from auditor.execution.resolve import resolve
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.operations import operation
from auditor.paths import function_in
from auditor.plan.modules import evaluate, scopes_of
from auditor.records import Capture, Plan, ScopeChoice
from auditor.verify import run_patched
from tests.support.fake_cuda import NAMES
from tests.support.flat_models import LARGE, FlatBlock, Stack
from tests.support.problems import Held, fp32_of, owners_of, problem_of, tied_owners
from tests.support.replaying import Model
from tests.support.small_models import MODELS
from tests.support.subjects import FORMATS, capture_of, normal, seeded


@cache
def small(name: str) -> tuple[nn.Module, Capture]:
    model = seeded(KINDS[name][0])
    return model, capture_of(model, *KINDS[name][1])


class Observed:
    """Notes the dtypes of a run."""

    def __init__(self) -> None:
        self.dtypes: dict[str, str] = {}

    def __call__(self, node: fx.Node, result: Any) -> None:
        if node.op in ("call_function", "placeholder") and isinstance(result, Tensor):
            self.dtypes[node.name] = NAMES.get(result.dtype, "")


def assert_simulated_as_patched(name: str, strategy: str, fmt: str, labels: dict[str, str]) -> bool:
    """One choice of precisions: the graph under it, and the model that is patched to follow it, give the same bits.

    The dtypes are those that are foretold; what the one refuses, so does the other: then the answer is False.
    """
    model, capture = small(name)
    inputs = KINDS[name][1]
    problem = replace(problem_of(capture, strategy), format=fmt)
    point = evaluate(problem, fp32_of(labels))
    scopes, choice = scopes_of(problem, point), choice_keeping(point.high, fmt)
    assert choice_from_scopes(scopes).keep == choice.keep
    patched = apply_plan(copy.deepcopy(model), plan_table(Plan("drawn", strategy, fmt, scopes, 0.0, 0.0, 1.0)))
    how, observed = Policy(capture, strategy, choice, fmt), Observed()
    foretold = resolve(how)
    try:
        with torch.no_grad():
            flat = capture.bind(model, (inputs, {}))
            simulated = tensor_outputs(Executor(capture.graph_module, how, observed).run(*flat))
    except UnsupportedInFormat:
        assert foretold.conflicts
        with pytest.raises(Exception, match=r"dtype|together"):
            run_patched(patched, [(inputs, {})], "cpu")
        return False
    (actual,) = run_patched(patched, [(inputs, {})], "cpu")
    for a, b in zip(actual, simulated, strict=True):  # a low scope in an FP32 one hands its result back in FP32
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0, equal_nan=True, msg=str(scopes))
    assert not foretold.conflicts
    assert {node: foretold.dtypes[node] for node in observed.dtypes} == observed.dtypes
    return True


def labels_of(name: str, low: str, fp32: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> dict[str, str]:
    """Everything low but what lies in `fp32`; or everything FP32 but what lies in `only`."""
    owners = owners_of(small(name)[1])
    if only:
        return {owner: low if owner.startswith(only) and owner else "fp32" for owner in owners}
    return {owner: "fp32" if owner.startswith(fp32) and fp32 else low for owner in owners}


def inner(m: Any, x: Tensor) -> Tensor:
    """Switches autocast off for one call of its layer, not for the other."""
    with torch.autocast("cpu", enabled=False):
        y = m.linear(x.float())
    return m.norm(y) + m.linear(x)


class Regions(nn.Module):
    """Regions around calls and inside them, a part called twice, and a layer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = Model(inner, linear=nn.Linear(6, 6), norm=nn.LayerNorm(6)), nn.GELU()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6))
        self.other = nn.Sequential(self.body[0], nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            y = self.inner(x)
        z = self.body(self.body(self.act(y)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = self.inner(z) + self.other(self.act(x))
        return w, z * w


KINDS = {**MODELS, "regions": (Regions, (normal(4, 6),)), "held": (Held, (normal(4, 4),))}
KINDS |= {"flat": (FlatBlock, LARGE), "stack": (Stack, LARGE)}


def test_the_holder_of_a_tied_weight_has_a_say_though_it_is_never_called() -> None:
    """Left FP32 with the root, it keeps the weight in FP32: the layers that share it must then be FP32 too."""
    assert owners_of(small("held")[1]) == ["", "body.0", "body.1", "last", "shared"]
    labels = labels_of("held", "bf16", ("shared", "body.0", "last"))
    assert_simulated_as_patched("held", "cast", "bf16", labels)
    low = {"": "fp32", "body.0": "bf16", "body.1": "fp32", "last": "bf16", "shared": "bf16"}
    assert_simulated_as_patched("held", "cast", "bf16", low)


def drawn_functions(name: str, strategy: str, fmt: str, rnd: random.Random) -> dict[str, str]:
    """Most modules low, some of their functions kept."""
    capture = small(name)[1]
    labels = {owner: rnd.choice([fmt, fmt, fmt, "fp32"]) for owner in owners_of(capture)}
    for group in tied_owners(capture) if strategy == "cast" else ():
        labels |= dict.fromkeys(group, labels[group[0]])
    nodes = [node for node in capture.nodes.values() if node.function is not None and not operation(node.op).cast]
    functions = {(node.owner, node.function.path) for node in nodes}
    return labels | {function_in(*found): rnd.choice([fmt, "fp32"]) for found in sorted(functions)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("transformer", "regions", "held")])
def test_functions_that_are_kept_are_simulated_as_patched(name: str, strategy: str) -> None:
    """The transformer asks what dtype a kept result has, which the graph does not know."""
    rnd = random.Random(name + strategy)
    drawn = [(fmt, drawn_functions(name, strategy, fmt, rnd)) for fmt in ("fp16", "bf16")]
    assert sum(assert_simulated_as_patched(name, strategy, fmt, labels) for fmt, labels in drawn)


def test_a_function_is_fp32_where_its_module_is_or_keeps_it() -> None:
    choice = choice_from_scopes(
        {"": ScopeChoice("fp16"), "a": ScopeChoice("fp16", keep=("pow",)), "b": ScopeChoice("fp32")}
    )
    assert choice(function_in("a", "pow")) == "fp32"
    assert choice(function_in("a", "mean")) == choice("a") == "fp16"
    assert choice(function_in("b", "mean")) == "fp32"


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_any_choice_of_scopes_is_simulated_as_patched(name: str, strategy: str, data: st.DataObject) -> None:
    capture, fmt = small(name)[1], data.draw(st.sampled_from(FORMATS), label="format")
    labels = {owner: data.draw(st.sampled_from([fmt, "fp32"]), label=owner) for owner in owners_of(capture)}
    for group in tied_owners(capture) if strategy == "cast" else ():
        labels |= dict.fromkeys(group, labels[group[0]])
    assert_simulated_as_patched(name, strategy, fmt, labels)
