"""Dtypes worked out without a run against two that run: CUDA's own autocast on fake tensors, and the policy interpreter."""

import copy
import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from auditor.artefact.applying import apply_plan
from auditor.artefact.base import plan_table
from auditor.artefact.strategies import SHIPPED as STRATEGIES
from auditor.emulation.emulate import emulate
from auditor.execution.beside import scopes_of
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, choice_from_scopes, choice_keeping, plain
from auditor.execution.resolve import Resolver, resolve
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.operations import operation
from auditor.records import Capture, Plan, ScopeChoice
from auditor.records.paths import function_in, of_function
from auditor.verify.running import run_patched
from tests.support.capturing import Function
from tests.support.fake_cuda import NAMES, recorded_dtypes
from tests.support.flat_models import LARGE, FlatBlock, Stack
from tests.support.problems import fp32_of, held, owners_of, problem_of, tied_owners
from tests.support.small_models import MODELS, Regions
from tests.support.subjects import DTYPES, FORMATS, capture_of, nodes_by_op, normal, only, seeded

KINDS = {**MODELS, "regions": (Regions, (normal(4, 6),)), "held": (held, (normal(4, 4),))}
KINDS |= {"flat": (FlatBlock, LARGE), "stack": (Stack, LARGE)}


@cache
def recorded(name: str) -> tuple[nn.Module, Capture]:
    model = seeded(KINDS[name][0])
    return model, capture_of(model, *KINDS[name][1])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_plain_autocast_against_torchs_own(name: str, fmt: str) -> None:
    """The author's own regions are the interpreter's business; fake tensors know the ambient autocast alone."""
    model, capture = recorded(name)
    capture = replace(capture, nodes={name: replace(node, region=None) for name, node in capture.nodes.items()})
    flat = capture.bind(model, (MODELS[name][1], {}))
    truth = recorded_dtypes(capture, flat, DTYPES[fmt])
    found = resolve(Policy(capture, "autocast", plain(fmt), fmt)).dtypes
    wrong = {f"{n} ({capture.nodes[n].op})": (found[n], truth[n]) for n in truth if found[n] != truth[n]}
    assert wrong == {}


PAIR = normal(4, 4), normal(4, 4)
SINGLE: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "square": (lambda x, w: (x @ w).square() + 1, PAIR),
    "power": (lambda x, w: (x @ w) ** 2 + 2 ** (x @ w), PAIR),
    "softmax": (lambda x, w: (x @ w).softmax(-1) @ w, PAIR),
    "scalar tensor": (lambda x, w: (x @ w) * torch.tensor(2.0), PAIR),
    "integer": (lambda x, w: (x @ w) * torch.arange(4), PAIR),
    "where": (lambda x, w: torch.where(x > 0, x @ w, x), PAIR),
    "where scalar": (lambda x, w: torch.where(x > 0, x @ w, 0.0), PAIR),
    "cat": (lambda x, w: torch.cat([x @ w, x]), PAIR),
    "batch norm": (
        lambda x, w: F.batch_norm(F.conv1d(x, w), torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3)),
        (normal(2, 3, 5), normal(3, 3, 1)),
    ),
    "embedding": (lambda x, w: F.embedding(x, w) @ w, (torch.tensor([1, 2]), normal(4, 4))),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x, x, w), (normal(1, 2, 4, 8), normal(1, 2, 4, 8))),
    "topk": (lambda x, w: (x @ w).topk(2, -1), PAIR),
    "index put": (lambda x, w: (x @ w).index_put((torch.tensor([0]),), (x @ w)[:1]), PAIR),
    "scatter add": (lambda x, w: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.int64), x @ w), PAIR),
    "double": (lambda x, w: (x @ w).double() @ w.double(), PAIR),
    "half by hand": (lambda x, w: x.half() * 2, PAIR),
    "half and float": (lambda x, w: x.half() + x.bfloat16(), PAIR),
    "full like": (lambda x, w: torch.full_like(x @ w, 2.0) + x @ w, PAIR),
    "one hot": (lambda x, w: F.one_hot((x @ w).argmax(-1), 4) * (x @ w), PAIR),
    "clamp": (lambda x, w: (x @ w).clamp(min=-1.0).clamp(max=x), PAIR),
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_operations_under_autocast(name: str) -> None:
    function, inputs = SINGLE[name]
    capture = capture_of(Function(function), *inputs)
    truth = recorded_dtypes(capture, capture.bind(nn.Module(), (inputs, {})), torch.float16)
    found = resolve(Policy(capture, "autocast", plain("fp16"), "fp16")).dtypes
    assert {node: found[node] for node in truth} == truth


def test_a_cast_to_the_dtype_of_another_value_follows_it_under_autocast() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return x.type_as(x @ w) * 2

    with emulate("cuda"), torch.autocast("cuda", dtype=torch.float16):
        assert function(*PAIR).dtype is torch.float16
    capture = capture_of(Function(function), *PAIR)
    found = resolve(Policy(capture, "autocast", plain("fp16"), "fp16")).dtypes
    assert {name: found[name] for name in ("to", "mul")} == {"to": "fp16", "mul": "fp16"}


def test_a_low_window_of_an_fp32_spectrum_gives_fp32() -> None:
    capture = capture_of(Function(lambda x, w: torch.istft(x + 0j, 4, window=w)), normal(2, 3, 5), torch.ones(4))
    assert resolve(Policy(capture, "cast", plain("bf16"), "bf16")).dtypes[only(capture, "istft").name] == "fp32"


def test_values_that_autocast_lowers_are_listed_with_their_readers() -> None:
    capture = capture_of(Function(lambda x, w: (x @ w).exp() @ w), normal(4, 4), normal(4, 4))
    first, second = (node.name for node in nodes_by_op(capture, "matmul"))
    x, w = (placeholder.name for placeholder in capture.placeholders)
    found = resolve(Policy(capture, "autocast", plain("fp16"), "fp16"))
    # exp is raised to FP32 by autocast, and lowered again on its way into the second product
    assert found.dtypes[only(capture, "exp").name] == "fp32"
    assert found.readers_of_rounded == {x: {first}, w: {first, second}, only(capture, "exp").name: {second}}
    assert found.low(first) and not found.low(w)


def test_a_solver_of_two_dtypes_is_a_conflict_and_a_pointwise_function_promotes() -> None:
    """Both have no half kernels on CUDA."""
    for function, conflicts in ((torch.linalg.solve, {"linalg_solve"}), (torch.special.zeta, set[str]())):
        capture = capture_of(Function(lambda x, w, f=function: f(x, w.half().float())), normal(4, 4), normal(4, 4))
        assert resolve(Policy(capture, "cast", plain("fp16"), "fp16")).conflicts == conflicts
        if conflicts:
            with pytest.raises(RuntimeError, match="same dtype"):
                function(torch.eye(4), torch.eye(4).half())


def test_a_product_of_two_dtypes_is_a_conflict_without_autocast() -> None:
    capture = capture_of(Function(lambda x, w: x @ w.half().float()), normal(4, 4), normal(4, 4))
    found = resolve(Policy(capture, "cast", plain("fp16"), "fp16"))
    assert found.conflicts == {only(capture, "matmul").name}
    assert resolve(Policy(capture, "autocast", plain("fp16"), "fp16")).conflicts == frozenset()


def test_a_limit_of_the_dtype_stays_fp32_where_the_value_does() -> None:
    # The norm is FP32 under autocast, so its Python reads FP32's limit; the value never fits FP16, nor has to.
    def normed(x: Tensor) -> Tensor:
        y = F.layer_norm(x, (4,))
        return y.masked_fill(y > 0, torch.finfo(y.dtype).min).softmax(-1)

    capture = capture_of(Function(normed), normal(4, 4))
    filled: list[float] = []

    def note(node: fx.Node, result: Any) -> None:
        if node.name == only(capture, "masked_fill").name:
            filled.append(float(result.min()))

    how = Policy(capture, "autocast", plain("fp16"), "fp16")
    with torch.no_grad():
        Executor(capture.graph_module, how, note).run(normal(4, 4))
    assert filled == [torch.finfo(torch.float32).min]


def test_a_dtype_that_the_author_asks_for_is_what_its_arguments_are_lowered_to() -> None:
    # of the dtypes it is given autocast takes none back: softmax without one is raised to FP32, so that nothing is lowered
    capture = capture_of(Function(lambda x: x.softmax(-1, dtype=torch.float16)), normal(4, 4))
    found, name = resolve(Policy(capture, "autocast", plain("bf16"), "bf16")), only(capture, "softmax").name
    assert (found.dtypes[name], found.readers_of_rounded) == ("fp16", {capture.placeholders[0].name: {name}})
    plainly = capture_of(Function(lambda x: x.softmax(-1)), normal(4, 4))
    assert resolve(Policy(plainly, "autocast", plain("bf16"), "bf16")).readers_of_rounded == {}


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_looked_at_again_is_what_a_walk_of_its_own_finds(name: str, strategy: str) -> None:
    capture, draw = recorded(name)[1], random.Random(name)
    owners, choice, again = owners_of(capture), dict[str, str](), Resolver(capture)
    for fmt in ("fp16", "fp16", "fp16", "fp16", "bf16", "bf16"):
        choice |= {owner: draw.choice([fmt, "fp32"]) for owner in draw.sample(owners, min(2, len(owners)))}
        low = {owner: fmt for owner, precision in choice.items() if precision != "fp32"}
        how = Policy(capture, strategy, lambda owner, low=low: low.get(owner, "fp32"), fmt)
        assert again(how) == resolve(how)


def test_what_is_complex_is_low_where_all_that_it_is_made_of_is() -> None:
    turned = torch.polar(torch.ones(5), torch.arange(5.0))

    def spectra(x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(x)
        return spectrum.transpose(0, 1).abs().pow(2), (spectrum * turned).real

    captured = capture_of(Function(spectra), normal(4, 8))
    dtypes = resolve(Policy(captured, "cast", plain("fp16"), "fp16")).dtypes
    assert {dtypes[only(captured, op).name] for op in ("fft_rfft", "transpose", "abs", "pow")} == {"fp16"}
    assert dtypes[only(captured, "mul").name] == ""  # complex64, since one factor is
    bf16 = resolve(Policy(captured, "cast", plain("bf16"), "bf16")).dtypes
    assert (bf16[only(captured, "fft_rfft").name], bf16[only(captured, "abs").name]) == ("", "fp32")
    high = resolve(Policy(captured, "cast", plain("fp32"), "fp16")).dtypes
    assert (high[only(captured, "fft_rfft").name], high[only(captured, "abs").name]) == ("", "fp32")


# The graph that is simulated under a plan and the model that is patched to follow it give the same bits.


def assert_simulated_as_patched(name: str, strategy: str, fmt: str, labels: dict[str, str]) -> bool:
    """One choice of precisions: the graph under it, and the model that is patched to follow it, give the same bits.

    The dtypes are those that are foretold; what the one refuses, so does the other: then the answer is False.
    """
    model, capture = recorded(name)
    inputs = KINDS[name][1]
    problem, functions = replace(problem_of(capture, strategy), format=fmt), defaultdict[str, set[str]](set)
    for owner, function in filter(None, map(of_function, labels.keys() - problem.products.keys())):
        functions[owner].add(function)
    problem.__dict__["exceptions"] = functions  # all that may be kept
    point = problem.evaluate(fp32_of(labels))
    choice = choice_keeping(point.high, fmt)
    scopes = scopes_of(problem.policy_for(choice))
    planned = choice_from_scopes(scopes)
    assert (planned.keep, planned.fp32_output) == (choice.keep, choice.fp32_output)
    patched = apply_plan(copy.deepcopy(model), plan_table(Plan("drawn", strategy, fmt, scopes, 0.0, 0.0, 1.0)))
    how, observed = Policy(capture, strategy, choice, fmt), dict[str, str]()
    foretold = resolve(how)

    def observe(node: fx.Node, result: Any) -> None:
        if node.op in ("call_function", "placeholder") and isinstance(result, Tensor):
            observed[node.name] = NAMES.get(result.dtype, "")

    try:
        with torch.no_grad():
            flat = capture.bind(model, (inputs, {}))
            simulated = tensor_outputs(Executor(capture.graph_module, how, observe).run(*flat))
    except UnsupportedInFormat:
        assert foretold.conflicts
        with pytest.raises(Exception, match=r"dtype|together"):
            run_patched(patched, [(inputs, {})], "cpu")
        return False
    (actual,) = run_patched(patched, [(inputs, {})], "cpu")
    for a, b in zip(actual, simulated, strict=True):  # a low scope in an FP32 one hands its result back in FP32
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0, equal_nan=True, msg=str(scopes))
    assert not foretold.conflicts
    assert {node: foretold.dtypes[node] for node in observed} == observed
    return True


def test_the_holder_of_a_tied_weight_has_a_say_though_it_is_never_called() -> None:
    """Left FP32 with the root, it keeps the weight in FP32: the layers that share it must then be FP32 too."""
    assert owners_of(recorded("held")[1]) == ["", "body.0", "body.1", "last", "shared"]
    high = {"": "bf16", "body.0": "fp32", "body.1": "bf16", "last": "fp32", "shared": "fp32"}
    assert_simulated_as_patched("held", "cast", "bf16", high)
    low = {"": "fp32", "body.0": "bf16", "body.1": "fp32", "last": "bf16", "shared": "bf16"}
    assert_simulated_as_patched("held", "cast", "bf16", low)


def drawn_functions(name: str, strategy: str, fmt: str, rnd: random.Random) -> dict[str, str]:
    """Most modules low, some of their functions kept."""
    capture = recorded(name)[1]
    labels = {owner: rnd.choice([fmt, fmt, fmt, "fp32"]) for owner in owners_of(capture)}
    for group in tied_owners(capture) if strategy == "cast" else ():
        labels |= dict.fromkeys(group, labels[group[0]])
    nodes = [node for node in capture.nodes.values() if node.function is not None and not operation(node.op).cast]
    functions = sorted({(node.owner, node.function.path) for node in nodes})
    paths = [*(function_in(*found) for found in functions), *sorted(problem_of(capture, strategy).products)]
    return labels | {path: rnd.choice([fmt, "fp32"]) for path in paths}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("transformer", "regions", "held")])
def test_functions_that_are_kept_or_have_fp32_output_are_simulated_as_patched(name: str, strategy: str) -> None:
    """The transformer asks what dtype a kept result has, which the graph does not know."""
    rnd = random.Random(name + strategy)
    drawn = [(fmt, drawn_functions(name, strategy, fmt, rnd)) for fmt in ("fp16", "bf16")]
    outputs = dict.fromkeys(problem_of(recorded(name)[1], strategy).products, "fp32")
    drawn.append(("bf16", dict.fromkeys(owners_of(recorded(name)[1]), "bf16") | outputs))
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
    capture, fmt = recorded(name)[1], data.draw(st.sampled_from(FORMATS), label="format")
    labels = {owner: data.draw(st.sampled_from([fmt, "fp32"]), label=owner) for owner in owners_of(capture)}
    for group in tied_owners(capture) if strategy == "cast" else ():
        labels |= dict.fromkeys(group, labels[group[0]])
    assert_simulated_as_patched(name, strategy, fmt, labels)
