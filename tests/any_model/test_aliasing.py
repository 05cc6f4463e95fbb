"""Memory that several names lead to: inputs, buffers, parameters and outputs that are, or lie over, one another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.errors import AuditorError
from tests.any_model.holding import held
from tests.any_model.models import Two
from tests.support.subjects import normal, seeded

X = normal(4, 8)


class Reads(Two):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.second(self.first(x) * y)


class Writes(Reads):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x.add_(1), y)


class AsksWhether(Reads):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) if x is y else self.first(x)


def twice() -> Any:
    x = X.clone()
    return x, x


def overlapping() -> Any:
    x = normal(4, 12)
    return x[:, :8], x[:, 4:]


INPUTS: list[Callable[[], Any]] = [twice, overlapping]


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", [Reads, Writes])
def test_inputs_on_one_memory(kind: type[nn.Module], inputs: Callable[[], Any]) -> None:
    held(lambda: (seeded(kind).eval(), (inputs(), {})), formats=("bf16",))


def test_one_tensor_given_twice_is_one_tensor_to_the_model() -> None:
    audit = held(lambda: (seeded(AsksWhether).eval(), (twice(), {})), formats=("fp16",))
    assert sum(report.node.op == "aten.linear.default" for report in audit.nodes) == 2


class Masked(Two):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        mask.mul_(2)
        return super().forward(x) * mask + mask.sum()


@pytest.mark.parametrize("dtype", [torch.float16])
def test_half_inputs_that_are_written(dtype: torch.dtype) -> None:
    mask = X.to(dtype)
    before = mask.clone()
    auditor.audit(seeded(Masked).eval(), (X, mask), device="cpu", formats=("bf16",))
    assert torch.equal(mask, before)
    held(lambda: (seeded(Masked).eval(), ((X.detach().clone(), X.detach().to(dtype)), {})), formats=("bf16",))


class OneStorage(Two):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(16)
        for name, part in (("a", whole[:8]), ("same", whole[:8]), ("b", whole[4:12]), ("whole", whole)):
            self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        self.a.add_(x.mean(0).float())
        return self.second(x) * self.same.to(x.dtype) + self.b.sum().to(x.dtype) + self.whole.sum().to(x.dtype)


class BufferOnAWeight(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", self.second.weight.data[:4])

    def forward(self, x: Tensor) -> Any:
        self.rows.mul_(0.9)
        return super().forward(x)


class NumpyOnABuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(8))
        self.array = self.scale.numpy()

    def forward(self, x: Tensor) -> Any:
        self.array[:] = 0.5
        return super().forward(x) * self.scale.to(x.dtype)


class FlatWeights(nn.Module):
    """Weights that lie in one another, as an optimizer that flattens them leaves them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(144)
        self.flat, self.weight, self.bias = (nn.Parameter(x) for x in (flat, flat[:64].view(8, 8), flat[64:72]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.flat.sum()


@pytest.mark.parametrize("kind", [OneStorage, BufferOnAWeight, FlatWeights])
def test_state_on_one_memory(kind: type[nn.Module]) -> None:
    audit = held(lambda: (seeded(kind).eval(), ((X.detach().clone(),), {})), formats=("bf16",))
    # With the memory untied while plans are tried, none but those of FP32 weights would hold.
    assert audit.plans["autocast_bf16"].verified and audit.plans["autocast_bf16"].low_precision_flops > 0


def test_what_numpy_writes_into_a_buffer_ends_in_one_line_and_comes_back() -> None:
    model = seeded(NumpyOnABuffer).eval()
    with pytest.raises(AuditorError) as caught:
        auditor.audit(model, (X.detach(),), device="cpu")
    assert caught.value.slug == "capture-failed"
    assert model.scale.tolist() == [0] * 8 and model.array.tolist() == [0] * 8


class Tied(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.words, self.body = how, nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        if how == "data":
            self.head.weight.data = self.words.weight.data
        elif how == "buffer":
            del self.head.weight
            self.head.register_buffer("weight", self.words.weight.data)
        elif how == "transposed":
            self.turned = nn.Parameter(self.words.weight.data.t())
        elif how == "module":
            self.again = nn.ModuleList([self.body])

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.words(x))
        if self.how == "forward":
            self.head.weight = self.words.weight
        if self.how == "transposed":
            return x @ self.turned
        return self.head(self.again[0](x) if self.how == "module" else x)


WAYS = [
    "data",
    "buffer",
    "transposed",
    "module",
    "forward",
]


@pytest.mark.parametrize("how", WAYS)
def test_tied_weights(how: str) -> None:
    held(lambda: (seeded(functools.partial(Tied, how)).eval(), ((torch.arange(6)[None],), {})), formats=("fp16",))


class Answers(Two):
    """Hands out its input, its weight, views of one value and a value that is written after it was read."""

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        read = self.second(h)
        h.view(-1).mul_(2)
        return h, h.t(), h[0], x, self.second.weight, x, read


class AnswersItsInput(Two):
    def forward(self, x: Tensor) -> Any:
        x += self.first(x)
        return x


@pytest.mark.parametrize("kind", [Answers, AnswersItsInput])
def test_answers_that_are_other_things_too(kind: type[nn.Module]) -> None:
    held(lambda: (seeded(kind).eval(), ((X.detach().clone(),), {})), formats=("fp16",))
