"""A run for the sake of its dtypes: products give zeros of the right shape and dtype, the rest is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.capture import outlines
from auditor.capture.outlines import Outlines
from auditor.capture.regions import Region

aten = torch.ops.aten
OFF = Region(False, "float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_give_zeros(dtype: torch.dtype) -> None:
    x, weight = torch.ones(3, 2, 4, dtype=dtype), torch.ones(5, 4, dtype=dtype)
    found = Outlines().part(aten.linear.default, (x, weight), {}, OFF)
    assert (found.shape, found.dtype, found.device.type) == ((3, 2, 5), dtype, "cpu")
    assert not found.any()


def test_products_follow_autocast() -> None:
    region = Region(True, "float16")
    found = Outlines().whole(aten.matmul.default, (torch.ones(2, 3), torch.ones(3, 2)), {}, region)
    assert found.dtype is torch.float16
    assert not found.any()


def test_the_rest_is_computed() -> None:
    assert Outlines().part(aten.add.Tensor, (torch.ones(1), torch.ones(1)), {}, OFF).item() == 2.0


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_take_one_step(batch_first: bool) -> None:
    layer = nn.LSTM(3, 4, batch_first=batch_first)
    x = torch.ones(2, 7, 3)
    batch = 2 if batch_first else 7
    states = [torch.zeros(1, batch, 4), torch.zeros(1, batch, 4)]
    args = (x, states, list(layer.parameters()), True, 1, 0.0, False, False, batch_first)
    output, *found = Outlines().part(aten.lstm.input, args, {}, OFF)
    assert output.shape == (2, 7, 4)
    assert [state.shape for state in found] == [(1, batch, 4)] * 2
    steps = output.unbind(1 if batch_first else 0)
    assert all(torch.equal(step, steps[0]) for step in steps)  # the first one, again and again


def test_products_that_are_alike_are_outlined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, outline = [], outlines._outline
    monkeypatch.setattr(outlines, "_outline", lambda x: (seen.append(x.dtype), outline(x))[1])
    handler, square = Outlines(), torch.ones(3, 3)
    for given in ((square, square), (square, torch.ones(3, 3)), (square.half(), square.half()), (square, square.t())):
        assert handler.part(aten.mm.default, given, {}, OFF).dtype is given[0].dtype
    assert seen == [torch.float32] * 2 + [torch.float16] * 2 + [torch.float32] * 2
