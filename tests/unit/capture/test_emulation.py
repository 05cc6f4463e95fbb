"""The handler that runs operations as CUDA does: dtypes on the way in, arithmetic, and what CUDA lacks."""

from __future__ import annotations

import pytest
import torch

from auditor.capture.emulation import Emulation, Endless
from auditor.capture.regions import Region
from auditor.numerics.kernels import UnsupportedInFormat

aten = torch.ops.aten
OFF, FP16, BF16 = Region(False, "float32"), Region(True, "float16"), Region(True, "bfloat16")
X = torch.tensor([[1.0, 2.0]])


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


def test_dropout_outside_of_training_returns_what_it_is_given() -> None:
    x, mode = torch.randn(8).half(), Emulation()
    assert mode.whole(aten.dropout.default, (x, 0.5, False), {}, OFF) is x
    torch.manual_seed(0)
    thinned = mode.whole(aten.dropout.default, (x, 0.5, True), {}, OFF)
    torch.manual_seed(0)
    assert torch.equal(thinned, torch.dropout(x.float(), 0.5, True).half())
