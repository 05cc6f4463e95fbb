"""A product's error by cause: known by hand, adding up on real architectures, and growing with K as the law says."""

import importlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from auditor.capture.capture import capture
from auditor.measure.measure import measure
from auditor.measure.products import sample_product
from auditor.numerics.casting import in_format
from auditor.numerics.formats import FORMATS
from auditor.numerics.nodes import over_tensors
from auditor.records import ProductError
from benchmarks.attribution import MODELS
from tests.support.capturing import Function
from tests.support.subjects import measurement_of, normal, subject_of
from tests.support.thinned import thinned

aten = torch.ops.aten
U = 2.0**-24
"""Unit roundoff of FP32."""


def split(target: Any, *args: Any, fmt: str = "bf16") -> ProductError:
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") if isinstance(x, Tensor) else x for i, x in enumerate(args)]
    sample = sample_product(graph.call_function(target, tuple(given)), {f"x{i}": x for i, x in enumerate(args)})
    result = sample.split(FORMATS[fmt]) if sample else None
    assert result is not None
    return result


def test_integers_that_the_format_holds_have_no_error_but_that_of_the_result() -> None:
    a, b = (
        torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0)).float()
        for shape in ((32, 16), (16, 32))
    )
    parts = split(aten.mm.default, a, b)
    # |sums| <= 1024 are exact in FP32; above 256 BF16 holds only even numbers
    assert (parts.inputs, parts.accumulation) == (0.0, 0.0)
    exact = (a @ b).double()
    assert (
        parts.output == parts.whole == pytest.approx(float((exact.bfloat16().double() - exact).norm() / exact.norm()))
    )


def test_inputs_that_are_rounded_are_all_of_the_error_where_the_result_is_exact() -> None:
    a, b = torch.full((4, 1), 1 + 2.0**-9), torch.full((1, 4), 2.0)
    parts = split(aten.mm.default, a, b)  # 1 + 2^-9 is between BF16's 1 and 1 + 2^-7: 2 instead of 2 + 2^-8
    assert parts.inputs == pytest.approx(2.0**-9 / (1 + 2.0**-9))
    assert (parts.accumulation, parts.output) == (0.0, 0.0)


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        (aten.mm.default, [(200, 96), (96, 100)]),
        (aten.matmul.default, [(4, 50, 96), (96, 100)]),
        (aten.matmul.default, [(4, 3, 50, 96), (4, 3, 96, 40)]),
        (aten.linear.default, [(4, 50, 96), (100, 96), (100,)]),
        (aten.addmm.default, [(100,), (200, 96), (96, 100)]),
        (aten.bmm.default, [(6, 50, 96), (6, 96, 40)]),
        (aten.conv2d.default, [(3, 16, 12, 12), (100, 16, 3, 3), (100,)]),
        (aten.conv2d.default, [(3, 96, 12, 12), (96, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 96]),
        (aten.conv_transpose2d.input, [(3, 16, 12, 12), (16, 20, 3, 3)]),
        (aten.mv.default, [(200, 96), (96,)]),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)  # fmt: skip
def test_a_sample_has_the_error_of_the_whole(target: Any, shapes: list[Any], fmt: str) -> None:
    """shapes: of tensors, and other arguments."""
    args = tuple(normal(*x, seed=seed) if isinstance(x, tuple) else x for seed, x in enumerate(shapes))
    parts, row = split(target, *args, fmt=fmt), FORMATS[fmt]
    exact = target(*over_tensors(Tensor.double, args))
    low = in_format(target(*over_tensors(lambda x: in_format(x, row).float(), args)), row).double()
    assert parts.whole == pytest.approx(float((low - exact).norm() / exact.norm()), rel=0.15)
    assert math.hypot(parts.inputs, parts.accumulation, parts.output) == pytest.approx(parts.whole, rel=0.1)


def sums(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in one FP32 accumulator per entry, term by term."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[None, k]
    return total


def test_accumulation_grows_with_the_root_of_the_length_and_blocks_keep_it_below() -> None:
    """Of K terms, each addition rounds a partial sum of size sqrt(k) by 0.42 u: 0.42 u sqrt(K / 2) of the result."""
    for length in (64, 1024, 16384):
        a, b = normal(16, length).half().float(), normal(length, 16, seed=1).half().float()
        exact = a.double() @ b.double()
        error = float((sums(a, b) - exact).norm() / exact.norm())
        assert error == pytest.approx(0.42 * U * math.sqrt(length / 2), rel=0.3)
        assert 0 < split(aten.mm.default, a, b, fmt="fp16").accumulation < 1.3 * error


def test_rounding_of_inputs_and_output_does_not_grow_with_the_length() -> None:
    several = [split(aten.mm.default, normal(32, k), normal(k, 32, seed=1)) for k in (64, 1024, 16384)]
    for parts in several:
        # a uniformly rounded number is off by 0.42 u; a term has two, and the result one
        assert parts.inputs == pytest.approx(math.sqrt(2) * 0.42 * 2.0**-8, rel=0.1)
        assert parts.output == pytest.approx(0.42 * 2.0**-8, rel=0.1)


def test_what_is_no_plain_product_is_not_split() -> None:
    function = Function(lambda x: F.linear(F.scaled_dot_product_attention(x, x, x).exp(), x[0, :, :]))
    found = measurement_of(function, normal(2, 8, 8)).errors
    split = {name for name, formats in found.items() if formats["bf16"].product is not None}
    assert split == {"linear"}


def _experts() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    text = importlib.import_module("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 4}
    config = text.MixtralConfig(vocab_size=200, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes)
    return text.MixtralForCausalLM(config).eval(), (torch.randint(3, 200, (4, 16)),), {}


@pytest.mark.parametrize("name", thinned(["vit", "gpt2", "resnet", "experts"], 4))
def test_the_causes_add_up_within_a_tenth_for_every_product_of_a_model(name: str) -> None:
    pytest.importorskip("transformers" if name in ("gpt2", "experts") else "timm")
    torch.manual_seed(0)
    model, args, kwargs = (MODELS | {"experts": _experts})[name]()
    subject = subject_of(model, *args, **kwargs)
    found = measure(capture(subject, ("fp16", "bf16")), model, subject.batches[0], ("fp16", "bf16")).errors
    parts = [e.product for formats in found.values() for e in formats.values() if e.product is not None]
    assert len(parts) >= 20
    for one in parts:
        assert math.hypot(one.inputs, one.accumulation, one.output) == pytest.approx(one.whole, rel=0.1)


def test_the_rounding_of_the_result_is_that_of_the_sum_as_accumulated() -> None:
    large = torch.full((8, 128), 2.0**14)  # cancels, so that the FP32 sum is about as wrong as its rounding to FP16
    x = torch.cat([large, normal(8, 256).half().float(), -large], 1)
    weight = torch.ones(1, x.shape[1])
    summed, exact = F.linear(x, weight).double(), x.double().sum(1, keepdim=True)
    parts = split(aten.linear.default, x, weight, fmt="fp16")
    rounding, wrong = ((summed.half().double() - other).norm() / exact.norm() for other in (summed, exact))
    assert not math.isclose(rounding, wrong, rel_tol=0.01)
    assert math.isclose(parts.output, rounding, rel_tol=1e-6)
