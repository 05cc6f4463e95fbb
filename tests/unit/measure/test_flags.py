"""What a flag is said to cost, against runs of the model with that arithmetic in every product."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.features.ledger.report import ledger_section
from auditor.measure.products import FLAGS
from auditor.numerics.accumulators import rounded_sum, truncated_sum
from auditor.numerics.casting import round_to
from auditor.numerics.formats import FORMATS
from auditor.numerics.metrics import relative_l2
from auditor.report.blocks import Grid
from tests.support.capturing import Function
from tests.support.subjects import normal, seeded

BUDGET = 0.01
Product = Callable[[Tensor, Tensor], Tensor]


def scaled(x: Tensor, format: str) -> tuple[Tensor, Tensor | float]:
    """Rounded in a format, whose range an 8-bit one uses; and the scale."""
    scale = FORMATS[format].largest / x.abs().max() if FORMATS[format].bytes == 1 else 1.0
    return round_to(x * scale, format).double(), scale


def summed(format: str, sum_of: Callable[[Tensor], Tensor]) -> Product:
    def multiply(x: Tensor, y: Tensor) -> Tensor:
        (x, one), (y, other) = scaled(x, format), scaled(y, format)
        return (sum_of(x.T.unsqueeze(-1) * y.unsqueeze(1)) / one / other).float()

    return multiply


def exact(format: str) -> Product:
    return summed(format, lambda terms: terms.sum(0))


RUNS: dict[str, tuple[Product, Product]] = {
    "cuda.matmul.allow_tf32": (torch.matmul, exact("tf32")),
    "allow_fp16_accumulation": (exact("fp16"), summed("fp16", lambda terms: rounded_sum(terms, "fp16", 16))),
    "allow_bf16_reduced_precision_reduction": (exact("bf16"), summed("bf16", lambda terms: rounded_sum(terms, "bf16"))),
    "FP8 sums in 14 bits": (exact("fp8_e4m3"), summed("fp8_e4m3", lambda terms: truncated_sum(terms, 14, 32))),
}
"""{flag: the product without it, and with it}."""

ONE = "FP8 sums in 14 bits"
"""Flag that is tried on a single product: between two, any change is a change of which numbers FP8 rounds up. A few
large numbers decide on its error, and the sample has 64 of 16,384 entries."""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))


@pytest.mark.parametrize("name", RUNS)
def test_it_is_what_a_run_with_this_arithmetic_in_every_product_gives(
    name: str, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float]
) -> None:
    model, x, outputs = seeded(net), normal(64, 256), list[Tensor]()
    if name == ONE:
        model = model[0]
        costs = dict(auditor.audit(model, x, strategies="autocast", formats="bf16", max_error=BUDGET).flags)
    for product in RUNS[name]:
        monkeypatch.setattr(F, "linear", lambda x, weight, bias, product=product: product(x, weight.T) + bias)
        with torch.no_grad():
            outputs.append(model(x))
    error = relative_l2(*outputs)
    assert costs[name] * BUDGET == pytest.approx(error, rel=1.0 if name == ONE else 0.4)


@pytest.fixture(scope="module")
def costs() -> dict[str, float]:
    return dict(auditor.audit(seeded(net), normal(64, 256), strategies="autocast", max_error=BUDGET).flags)


def test_the_section_on_dtypes_and_plan_json_have_them() -> None:
    audit = auditor.audit(nn.Linear(8, 8), normal(4, 8), strategies="autocast", formats="bf16")
    rows = next(
        block for block in ledger_section(audit) if isinstance(block, Grid) and block.heads[0] == "Setting"
    ).rows
    assert [row[0] for row in rows] == [*audit.flags] == [*audit.to_dict()["flags"]]


def test_each_flag_concerns_the_operations_that_follow_it(costs: dict[str, float]) -> None:
    assert [*costs] == [name for name, flag in FLAGS.items() if flag.of == "product"]
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    found = auditor.audit(model, normal(2, 3, 8, 8), formats="bf16", strategies="autocast").flags
    assert [*found] == ["cudnn.allow_tf32, convolutions"]


def test_a_product_that_fp64_cannot_sample_has_no_flags_and_ends_no_audit() -> None:
    sparse = Function(lambda x: x.relu().to_sparse() @ x.T)
    assert auditor.audit(sparse, normal(4, 6), formats="bf16", strategies="autocast").flags == {}
