"""Memory that several names lead to, and memory that lies otherwise; experts that Python loops over."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.any_model.holding import Two, drawn, held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

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


@pytest.mark.parametrize("inputs", [twice, overlapping])
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


def test_half_inputs_that_are_written() -> None:
    held(lambda: (seeded(Masked).eval(), ((X.detach().clone(), X.detach().half()), {})), formats=("bf16",))


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


def flat_weights() -> nn.Module:
    """Weights that lie in one another, as an optimizer that flattens them leaves them."""
    flat = torch.randn(144)
    flat, weight, bias = (nn.Parameter(x) for x in (flat, flat[:64].view(8, 8), flat[64:72]))
    return Model(lambda m, x: F.linear(x, m.weight, m.bias) + m.flat.sum(), flat=flat, weight=weight, bias=bias)


@pytest.mark.parametrize("kind", [OneStorage, BufferOnAWeight, flat_weights])
def test_state_on_one_memory(kind: type[nn.Module]) -> None:
    audit = held(lambda: (seeded(kind).eval(), ((X.detach().clone(),), {})), formats=("bf16",))
    # With the memory untied while plans are tried, none but those of FP32 weights would hold.
    assert audit.plans["autocast_bf16"].is_verified and audit.plans["autocast_bf16"].low_precision_flops > 0


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


@pytest.mark.parametrize("how", thinned(["data", "buffer", "transposed", "module", "forward"], 2))
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


# Values that lie otherwise in memory than a replay's: kernels round otherwise, and a model may magnify it.


def magnified(m: Any, x: Tensor) -> Tensor:
    """One pixel that lies channels last, written in place, spread out and convolved; then a chaotic map doubles last places.

    Out of place the pixel would lie channels first: with sides of 1 both are true of it.
    """
    pixel = m.first(x.contiguous(memory_format=torch.channels_last)).relu_()
    y = m.head(nn.functional.interpolate(pixel, scale_factor=4.0)).sigmoid()
    for _ in range(m.steps):
        y = 4 * y * (1 - y)
    return y


@pytest.mark.parametrize("steps", thinned([6, 0]))
def test_a_replay_that_rounds_otherwise_is_the_run(steps: int) -> None:
    def make() -> nn.Module:
        return Model(magnified, first=nn.Conv2d(256, 256, 3), head=nn.Conv2d(256, 64, 3, padding=1), steps=steps)

    held(drawn(make, 2, 256, 3, 3), max_error=0.5)


# Mixtures of experts that loop over their experts in Python: sizes depend on values, and some experts get nothing.

EXPERTS_X = normal(12, 8)


def added_by_index(m: Any, x: Tensor) -> Tensor:
    weights, route = m.gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        rows, which = torch.where(route == index)
        out.index_add_(0, rows, (expert(x[rows]) * weights[rows, which, None]).to(x.dtype))
    return out


def sorted_and_split(m: Any, x: Tensor) -> Tensor:
    route = m.gate(x)[:, :2].argmax(-1)  # never the last expert, which stays empty
    order = route.argsort(stable=True)
    sizes = torch.bincount(route, minlength=3).tolist()
    done = torch.cat([expert(rows) for expert, rows in zip(m.experts, x[order].split(sizes), strict=True)])
    out = torch.empty_like(done)
    out[order] = done
    return out


@pytest.mark.parametrize("spelling", [added_by_index, sorted_and_split])
def test_experts_in_a_loop(spelling: Callable[[Any, Tensor], Tensor]) -> None:
    def build() -> Any:
        experts = nn.ModuleList([linear(8, 8, seed=seed) for seed in range(3)])
        return Model(spelling, gate=linear(8, 3, seed=9), experts=experts).eval(), ((EXPERTS_X.clone(),), {})

    audit = held(build, formats=("fp16",))
    assert any("depends on the values" in warning for warning in audit.warnings)
    # Autocast takes the gate and the experts low, however their results are put together.
    assert audit.plans["autocast_fp16"].low_precision_flops > 0.9


@pytest.mark.parametrize("grouped", [torch._grouped_mm, getattr(F, "grouped_mm", torch._grouped_mm)])
def test_grouped_products_are_products(grouped: Callable[..., Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        route = m.gate(x).argmax(-1)
        order = route.argsort()
        ends = torch.bincount(route, minlength=4).cumsum(0).to(torch.int32)
        done = grouped(x[order], m.weight, offs=ends)
        return torch.zeros_like(done).index_copy(0, order, done)

    def build() -> Any:
        weight = nn.Parameter(normal(4, 16, 16, seed=1) / 4)
        return Model(forward, gate=linear(16, 4), weight=weight).eval(), ((normal(16, 16),), {})

    audit = held(build, formats=("bf16",))
    (product,) = (report for report in audit.nodes if "grouped" in report.node.op)
    assert product.flops == 2 * 16 * 16 * 16  # every token meets one expert: 16 tokens, 16 in, 16 out
    # Autocast leaves it alone, whose list it is not on; a model stored low runs it low.
    assert audit.plans["cast_bf16"].low_precision_flops == 1
