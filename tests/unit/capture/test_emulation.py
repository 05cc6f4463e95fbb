"""The handler that runs operations as CUDA does: dtypes on the way in, arithmetic, and what CUDA lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from auditor.capture.emulation import Emulation, Endless
from auditor.capture.regions import Region
from auditor.numerics.kernels import UnsupportedInFormat

aten = torch.ops.aten
OFF, FP16, BF16 = Region(False, "float32"), Region(True, "float16"), Region(True, "bfloat16")
X = torch.tensor([[1.0, 2.0]])


def dtypes(op: Any, *args: Any, region: Region) -> list[torch.dtype]:
    found, _ = Emulation().entering(op, args, {}, region)
    return [x.dtype for x in found if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(
    ("op", "args", "region", "expected"),
    [
        (aten.matmul.default, (X, X.t()), FP16, torch.float16),
        (aten.matmul.default, (X, X.t()), BF16, torch.bfloat16),
        (aten.matmul.default, (X, X.t()), OFF, torch.float32),
        (aten.matmul.default, (X, X.t()), Region(True, "float32"), torch.float32),
        (aten.exp.default, (X.half(),), FP16, torch.float32),
        (aten.relu.default, (X.half(),), FP16, torch.float16),
        (aten.addcmul.default, (X.half(), X, X.half()), FP16, torch.float32),  # promoted
        (aten.matmul.default, (X.double(), X.t().double()), FP16, torch.float64),  # not autocast's to move
        (aten.mul_.Tensor, (X.half(), X.half()), FP16, torch.float16),  # what writes is left alone
    ],
)
def test_what_autocast_makes_of_the_arguments(
    op: Any, args: tuple[Any, ...], region: Region, expected: torch.dtype
) -> None:
    assert set(dtypes(op, *args, region=region)) == {expected}


def test_a_product_sums_in_fp32_and_rounds_once() -> None:
    # FP16 spaces by 2 above 2048: adding up one by one would stay there, but 2048 + 100 is a value of FP16.
    x = torch.cat([torch.tensor([[2048.0]]), torch.ones(1, 100)], dim=1)
    found = Emulation().whole(aten.matmul.default, (x, torch.ones(101, 1)), {}, FP16)
    assert (found.item(), found.dtype) == (2148.0, torch.float16)


def test_what_cuda_lacks_raises_or_is_rounded() -> None:
    half = torch.eye(2, dtype=torch.float16)
    with pytest.raises(UnsupportedInFormat, match="kernel on CUDA"):
        Emulation().part(aten.linalg_cholesky.default, (half,), {}, OFF)
    found = Emulation(lenient=True).part(aten.linalg_cholesky.default, (half,), {}, OFF)
    assert (found.dtype, found.tolist()) == (torch.float16, [[1, 0], [0, 1]])


def test_a_run_that_goes_on_and_on_is_ended_and_casts_are_not_counted() -> None:
    emulation = Emulation(most=2)
    for _ in range(5):
        emulation.part(aten._to_copy.default, (X,), {"dtype": torch.float16}, OFF)
    for _ in range(2):
        emulation.part(aten.relu.default, (X.half(),), {}, OFF)
    with pytest.raises(Endless, match="ended after 2 operations"):
        emulation.part(aten.relu.default, (X.half(),), {}, OFF)


def test_random_numbers_are_those_of_fp32_rounded() -> None:
    def drawn(dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(0)
        found: torch.Tensor = Emulation().part(aten.rand_like.default, (torch.ones(9, dtype=dtype),), {}, OFF)
        return found

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(drawn(torch.float16), drawn(torch.float32).half())


def test_what_is_no_operation_of_torch_is_called_as_it_is() -> None:
    assert Emulation().part(lambda x, y=1: (x, y), (5,), {"y": 6}, FP16) == (5, 6)


def test_dropout_outside_of_training_returns_what_it_is_given() -> None:
    x, mode = torch.randn(8).half(), Emulation()
    assert mode.whole(aten.dropout.default, (x, 0.5, False), {}, OFF) is x
    torch.manual_seed(0)
    thinned = mode.whole(aten.dropout.default, (x, 0.5, True), {}, OFF)
    torch.manual_seed(0)
    assert torch.equal(thinned, torch.dropout(x.float(), 0.5, True).half())
