"""Matrix products as tensor cores compute them, worked out by hand, and the same by other kernels."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.capture.capture import capture
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy
from auditor.execution.policy import plain as everywhere
from auditor.execution.resolve import resolve
from auditor.numerics import kernels as products
from auditor.numerics.casting import carried_in, format_in, in_format, plain, round_tree, widen
from auditor.numerics.formats import FORMATS, Format, temporary_format
from auditor.numerics.kernels import UnsupportedInFormat, is_product, is_tensor_core, run_op
from auditor.numerics.metrics import relative_l2
from auditor.records import Capture, Subject
from tests.support.small_models import MODELS
from tests.support.subjects import normal, seeded, subject_of

aten = torch.ops.aten


def long_sum(dtype: torch.dtype, large: float, small: int) -> Tensor:
    """(large, 1, 1, ..., 1) with `small` ones: in `dtype`, large + 1 == large."""
    return torch.cat([torch.tensor([large]), torch.ones(small)]).to(dtype)


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        (aten.matmul.default, lambda x: (x[None], torch.ones_like(x)[:, None])),
        (aten.mm.default, lambda x: (x[None], torch.ones_like(x)[:, None])),
        (aten.linear.default, lambda x: (x[None], torch.ones_like(x)[None])),
        (aten.dot.default, lambda x: (x, torch.ones_like(x))),
        (aten.einsum.default, lambda x: ("i,i->", [x, torch.ones_like(x)])),
        (aten.conv1d.default, lambda x: (x[None, None], torch.ones_like(x)[None, None])),
    ],
)
def test_products_accumulate_in_float32(target: Any, shape: Any) -> None:
    # fp16 spaces by 2 from 2048 on: 2048 + 1 = 2048 (tie to even), a hundred times over. In FP32: 2048 + 100 = 2148.
    fp16 = run_op(target, shape(long_sum(torch.float16, 2048, 100)), {})
    assert (float(fp16), fp16.dtype) == (2148.0, torch.float16)
    # bf16 spaces by 2 from 256 on: 256 + 1 = 256; in FP32: 256 + 100 = 356
    bf16 = run_op(target, shape(long_sum(torch.bfloat16, 256, 100)), {})
    assert (float(bf16), bf16.dtype) == (356.0, torch.bfloat16)


def test_a_product_rounds_its_result_once() -> None:
    # 1 * 1 + 2^-6 * 2^-6 = 1 + 2^-12, below half of fp16's spacing 2^-10: rounds to 1, and to 1 + 2^-10 thrice over
    small = torch.tensor([1.0, 2**-6], dtype=torch.float16)
    assert float(run_op(aten.dot.default, (small, small), {})) == 1.0
    thrice = torch.tensor([1.0, 2**-6, 2**-6, 2**-6], dtype=torch.float16)
    assert float(run_op(aten.dot.default, (thrice, thrice), {})) == 1 + 2**-10  # 1 + 3 * 2^-12 is above the tie


def test_a_product_overflows_only_in_its_result() -> None:
    # 300 * 300 - 300 * 300: 90000 does not fit fp16, the accumulator holds it
    a, b = torch.tensor([300.0, 300.0]).half(), torch.tensor([300.0, -300.0]).half()
    assert float(run_op(aten.dot.default, (a, b), {})) == 0.0
    assert float(run_op(aten.dot.default, (a, a), {})) == math.inf  # 180000


def test_what_a_product_is() -> None:
    assert is_tensor_core(aten.scaled_dot_product_attention.default)
    assert not is_tensor_core(aten.softmax.int)
    assert is_product(aten.addmm.default)
    assert not is_product(aten.scaled_dot_product_attention.default)


@pytest.mark.parametrize("target", [aten.addmm_.default, aten.mm.out])
def test_what_writes_to_an_argument_is_left_to_the_machine(target: Any) -> None:
    assert not is_tensor_core(target)
    assert not is_product(target)


def test_a_product_that_is_told_where_to_write_writes_there() -> None:
    a, b, out = normal(3, 4).half(), normal(4, 2, seed=1).half(), torch.zeros(3, 2).half()
    assert run_op(aten.mm.out, (a, b), {"out": out}) is out
    assert torch.allclose(out.float(), a.float() @ b.float(), rtol=2**-8, atol=2**-8)


class Subclass(Tensor):
    """A tensor that says nothing of its own."""


@pytest.mark.parametrize(
    "other",
    [
        lambda x: torch.nested.nested_tensor([x[0], x[1, :9]]),
        lambda x: x[0].to_sparse(),
        lambda x: x.double(),
        lambda x: x.half().as_subclass(Subclass),
    ],
    ids=["nested", "sparse", "float64", "subclass"],
)
def test_products_of_tensors_that_are_not_plain(other: Any) -> None:
    x, weight = other(normal(3, 160, 192)), normal(160, 192, seed=1)
    weight = weight.to(x.dtype)
    found = products.product(aten.linear.default, (x, weight), {}, FORMATS["fp16"])
    expected = round_tree(aten.linear.default(*widen((x, weight))), FORMATS["fp16"])
    assert found.is_nested == x.is_nested
    parts = zip(*(y.unbind() if y.is_nested else [y.to_dense()] for y in (found, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in parts)


WIDE_PRODUCTS = [
    (aten.linear.default, (normal(3, 40, 192), normal(160, 192, seed=1), normal(160, seed=2))),
    (aten.linear.default, (normal(120, 192), normal(160, 192, seed=1))),
    (aten.addmm.default, (normal(160, seed=2), normal(120, 192), normal(192, 160, seed=1))),
    (aten.conv2d.default, (normal(2, 32, 30, 20), normal(48, 32, 1, 1, seed=1), normal(48, seed=2))),
    (aten.conv2d.default, (normal(2, 32, 30, 20), normal(48, 8, 1, 1, seed=1), None, [2, 1], [0, 0], [1, 1], 4)),
]


@pytest.mark.parametrize(("target", "args"), WIDE_PRODUCTS)
def test_a_product_is_the_same_with_gradients_enabled_and_has_those_of_the_operation(
    target: Any, args: tuple[Any, ...]
) -> None:
    """To the bit: else a plan's error is another for whoever runs it with gradients enabled."""

    def given() -> list[Any]:
        return [x.half().requires_grad_() if isinstance(x, Tensor) else x for x in args]

    ours, theirs = given(), given()
    found = products.product(target, tuple(ours), {}, FORMATS["fp16"])
    with torch.no_grad():
        plain = products.product(target, tuple(ours), {}, FORMATS["fp16"])
    assert torch.equal(found, plain)
    weights = normal(*found.shape, seed=3)
    leaves = [x for x in ours if isinstance(x, Tensor)]
    gradients = torch.autograd.grad((found.float() * weights).sum(), leaves, create_graph=True)
    expected = round_tree(target(*widen(tuple(theirs))), FORMATS["fp16"])
    others = [x for x in theirs if isinstance(x, Tensor)]
    known = torch.autograd.grad((expected.float() * weights).sum(), others, create_graph=True)
    for a, b in zip(gradients, known, strict=True):
        assert relative_l2(b, a) < 1e-3
    twice, expected_twice = (
        torch.autograd.grad(sum(one.float().square().sum() for one in found), given)
        for found, given in ((gradients, leaves[1]), (known, others[1]))
    )
    assert relative_l2(expected_twice[0], twice[0]) < 1e-3


# FP16's numbers under another name, and without torch's arithmetic: what rounding makes of it is held against FP16
# itself.


TWIN = Format.ieee("e5m10", exponent_bits=5, mantissa=10)
STRATEGIES = ("autocast", "cast")
REFUSED = ("mixture", "cast")  # its router reads `x.float()` beside weights that a cast has lowered
RUN = [(name, strategy) for name in MODELS for strategy in STRATEGIES if (name, strategy) != REFUSED]


@pytest.fixture(autouse=True)
def twin() -> Iterator[Format]:
    with temporary_format(TWIN) as row:
        yield row


@cache
def subject(name: str) -> Subject:
    model, inputs = MODELS[name]
    return subject_of(seeded(model), *inputs)


@cache
def captured(name: str) -> Capture:
    return capture(subject(name), ("fp16", "e5m10"))


def run(name: str, strategy: str, fmt: str) -> dict[str, Any]:
    """What every operation gives when all is low."""
    found: dict[str, Any] = {}
    how = Policy(captured(name), strategy, everywhere(fmt), fmt)
    recorded = captured(name)
    interpreter = Executor(recorded.graph_module, how, lambda n, value: found.__setitem__(n.name, value))
    with torch.no_grad():
        interpreter.run(*captured(name).bind(subject(name).model, subject(name).batches[0]))
    return {node: value for node, value in found.items() if node in captured(name).nodes}


@pytest.mark.parametrize(("name", "strategy"), RUN)
def test_a_run_carries_what_was_resolved(name: str, strategy: str) -> None:
    how = Policy(captured(name), strategy, everywhere("e5m10"), "e5m10")
    dtypes = resolve(how).dtypes
    carried = {
        node: "" if (row := format_in(value)) is None else row.name
        for node, value in run(name, strategy, "e5m10").items()
        if isinstance(value, Tensor)
    }
    assert carried == {node: dtypes[node] for node in carried}


@pytest.mark.parametrize(("name", "strategy"), RUN)
def test_a_run_differs_from_fp16s_by_what_kernels_round_inside(name: str, strategy: str) -> None:
    ours, theirs = run(name, strategy, "e5m10"), run(name, strategy, "fp16")
    for node, value in ours.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(plain(value).float(), theirs[node].float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("fmt", "named"), [("fp16", "float16"), ("e5m10", "e5m10")])
def test_what_fp16_refuses_is_refused(fmt: str, named: str) -> None:
    with pytest.raises(
        UnsupportedInFormat, match=f"linear has inputs of different dtypes, ({named} and float32|float32 and {named})"
    ):
        run(*REFUSED, fmt)


def test_products_are_the_same_bit_for_bit() -> None:
    x, weight = normal(5, 70, seed=1), normal(3, 70, seed=2)
    for target, args in ((aten.linear.default, (x, weight)), (aten.mm.default, (x, weight.t()))):
        ours = run_op(target, round_tree(args, TWIN), {})
        theirs = run_op(target, round_tree(args, FORMATS["fp16"]), {})
        assert carried_in(ours) is TWIN
        assert torch.equal(plain(ours), theirs.float())


LOW, HIGH, SCALAR = "e5m10", "fp32", "scalar"
PROMOTED = [
    (aten.add.Tensor, (LOW, LOW), LOW),
    (aten.add.Tensor, (LOW, HIGH), HIGH),
    (aten.add.Tensor, (HIGH, LOW), HIGH),
    (aten.mul.Tensor, (LOW, SCALAR), LOW),
    (aten.mul.Tensor, (SCALAR, LOW), LOW),
    (aten.add.Tensor, (LOW, "fp16"), HIGH),  # two low formats have FP32 in common
    (aten.mm.default, (LOW, LOW), LOW),
    (aten.masked_fill.Tensor, (LOW, "mask", SCALAR), LOW),
    (aten.index_put.default, (LOW, ["mask"], HIGH), LOW),
    (aten._to_copy.default, (LOW,), LOW),
    (aten.exp.default, (LOW,), LOW),
]


@pytest.mark.parametrize(("target", "kinds", "expected"), PROMOTED)
def test_promotion_is_that_of_torch(target: Any, kinds: tuple[Any, ...], expected: str) -> None:
    def made(kind: Any, stand_in: bool) -> Any:
        if isinstance(kind, list):
            return [made(item, stand_in) for item in kind]
        x = {"mask": torch.eye(2, dtype=torch.bool), SCALAR: torch.tensor(2.0), HIGH: torch.ones(2, 2)}.get(kind)
        if target is aten.index_put.default and kind == HIGH:
            return torch.ones(2)
        row = FORMATS["bf16" if stand_in and kind == LOW else kind] if x is None else None
        return in_format(torch.ones(2, 2), row) if row is not None else x

    if target is aten.index_put.default:  # which insists on one dtype: the value is a low one
        kinds = (LOW, ["mask"], LOW)
        args = (made(LOW, False), [torch.eye(2, dtype=torch.bool)], in_format(torch.ones(2), TWIN))
        native = (made(LOW, True), [torch.eye(2, dtype=torch.bool)], torch.ones(2).bfloat16())
    else:
        args, native = (tuple(made(kind, stand_in) for kind in kinds) for stand_in in (False, True))
    found = format_in(run_op(target, args, {}))
    torchs = format_in(target(*native))
    assert found is FORMATS[expected]
    assert torchs is FORMATS["bf16" if expected == LOW else expected]
