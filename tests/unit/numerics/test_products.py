"""Matrix products as tensor cores compute them, worked out by hand, and the same by other kernels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.numerics.casting import round_tree, widen
from auditor.numerics.formats import FORMATS
from auditor.numerics.kernels import is_product, is_tensor_core, run_op
from auditor.numerics.metrics import relative_l2
from tests.support.subjects import normal

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
        lambda x: x.as_subclass(Subclass),
    ],
    ids=["nested", "sparse", "subclass"],
)
def test_products_of_tensors_that_are_not_plain(other: Any) -> None:
    x, weight = other(normal(3, 160, 192).half()), normal(160, 192, seed=1).half()
    found = run_op(aten.linear.default, (x, weight), {})
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
def test_a_product_is_the_same_with_gradients_and_has_the_operations(target: Any, args: tuple[Any, ...]) -> None:
    """To the bit: else a plan's error is another for whoever runs it with gradients enabled."""

    def given() -> list[Any]:
        return [x.half().requires_grad_() if isinstance(x, Tensor) else x for x in args]

    ours, theirs = given(), given()
    found = run_op(target, tuple(ours), {})
    with torch.no_grad():
        plain = run_op(target, tuple(ours), {})
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
