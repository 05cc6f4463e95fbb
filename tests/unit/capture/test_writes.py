"""Writes in place, to views of views, inputs, buffers and out= arguments, become operations that return; all see them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from auditor.emulation.intercept import Handler, intercept
from auditor.errors import CaptureError
from auditor.isolation import isolate
from tests.support.replaying import Model, kinds, linear, operations, replayed
from tests.support.subjects import capture_of, normal

X = normal(4, 8)


def transposed(x: Tensor) -> Any:
    y = x.clone()
    y.t()[2:5].mul_(2)
    y.transpose(0, 1)[3].fill_(7.0)
    y.view(2, 2, 8).permute(2, 0, 1)[0].add_(1)
    y.mT[1].neg_()
    y.movedim(0, 1)[0] = 5
    return y


def turned(x: Tensor) -> Any:
    y = x.clone()
    part = y[1:]
    y.t_()
    y[0].add_(1)
    part.mul_(2)
    z = x.clone().unsqueeze_(0)
    z[0, 1].zero_()
    return y, part, z.squeeze_(0)


def complexes(x: Tensor) -> Any:
    y = torch.view_as_complex(x.reshape(4, 4, 2).clone())
    y.real.mul_(2)
    y.imag[1].add_(1)
    torch.view_as_real(y)[2].zero_()
    y.conj()[3].mul_(2j)
    return torch.view_as_real(y)


def bits(x: Tensor) -> Any:
    y = x.clone()
    y.view(torch.int32).bitwise_and_(-65536)  # drops the digits that BF16 lacks
    return y


def truths(x: Tensor) -> Any:
    y, z, n = x.clone(), x.clone(), torch.arange(4)
    y.gt_(0)
    z[0].logical_not_()
    n.ne_(2)
    return y, z, n * x.sum()


def integers(x: Tensor) -> Any:
    n = torch.arange(4, dtype=torch.int32)
    n.add_(torch.arange(4))
    n[1:].mul_(torch.tensor(3))
    return n * x.sum()


def other_dtypes(x: Tensor) -> Any:
    y = x.clone()
    y.add_(x.double())
    y[0].copy_(x[1].half())
    h = x.half()
    h += x
    return y, h


def with_out(x: Tensor) -> Any:
    empty, held, wide = torch.empty(0), torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.float64)
    torch.add(x, 1, out=empty)
    torch.mul(x, 2, out=held[1:3].new_empty(4, 8))
    torch.sub(x, 1, out=wide)
    torch.cumsum(x, 0, out=held)
    empty[0].zero_()
    return empty, held, wide, torch.max(x, 1, out=(torch.empty(0), torch.empty(0, dtype=torch.long)))


def by_index(x: Tensor) -> Any:
    y, rows = x.clone(), torch.tensor([0, 2])
    y[rows] = x[:2] * 2
    y[rows, 1] += 1
    y.index_add_(0, rows, x[:2])
    y.scatter_(1, torch.tensor([[1], [2], [3], [0]]), 9.0)
    y.masked_fill_(x > 1, 0.5)
    y[x < -1] = 0.25
    y[:, 1:3][x[:, 1:3] > 0] *= 2
    return y


def lists(x: Tensor) -> Any:
    parts = [x.clone(), x.clone() * 2]
    torch._foreach_mul_(parts, 3.0)
    torch._foreach_add_([part[0] for part in parts], 1.0)
    return parts


def from_lists(x: Tensor) -> Any:
    a, b = x[:, :1].clone(), x.clone()
    wide, same = torch.broadcast_tensors(a, b)
    b.add_(1)
    a.mul_(2)
    same[0].zero_()
    return wide, same, a, b, torch.meshgrid(a[:, 0], b[0], indexing="ij")


def elsewhere(x: Tensor) -> Any:
    y, z = x.clone(), x * 2
    y.data = z
    y.add_(1)
    z[0].zero_()
    w = x.clone()
    w.set_(z)
    w[1].fill_(2.0)
    z.resize_(2, 8)
    return y, z, w


def normalized_in_place(x: Tensor) -> Any:
    weight = torch.ones(10, 4)
    return nn.functional.embedding(torch.tensor([1, 2]), weight * x[:1, :4] * 9, max_norm=0.5), weight


WRITES = [
    transposed, turned, complexes, bits, truths, integers, other_dtypes, with_out, by_index, lists, from_lists,
    elsewhere, normalized_in_place,
]  # fmt: skip


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_writes(function: Callable[[Tensor], Any]) -> None:
    method = "path" if function is by_index else "run"
    found = replayed(Model(lambda self, x: function(x)), X, method=method)
    assert "input" in kinds(found)
    assert not any(target.endswith("_") for target in operations(found) if "foreach" not in target)


def test_writes_without_a_twin() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        y[1:].fill_diagonal_(3.0)
        return y, y[2].polygamma_(1)

    found = replayed(Model(forward), X)
    assert {"fill_diagonal_", "polygamma_"} <= set(operations(found))


def test_statistics_by_the_batch() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8, affine=False)).train()
    replayed(model, X)  # the average over all batches counts them in Python, whatever the inputs are
    replayed(nn.InstanceNorm1d(4, affine=True, track_running_stats=True).train(), normal(2, 4, 8))

    def twice(self: Any, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm(x * 2) + self.norm.running_mean

    replayed(Model(twice, norm=nn.BatchNorm1d(8)).train(), X)


def test_what_a_write_leaves_of_a_value_is_read_by_whoever_came_before_it() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        early = y * 1
        y.zero_()
        return early, y + 1

    found = replayed(Model(forward), X)
    assert operations(found) == ["exp", "mul", "zero", "add"]


def test_in_place_nodes_are_marked_and_those_that_pass_them_on_are_not() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:2].mul_(2)
        y.relu_()
        return y + 1

    found = replayed(Model(forward, layer=linear(8, 8)), X)
    assert {node.op.split(".")[1] for node in found.nodes.values() if node.in_place} == {"mul", "relu"}


# Whatever a run raises, everything that was put in place for it is gone afterwards.


RAISED_X = normal(3, 4)


def raising(error: BaseException) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            self.layer(x)
            region = torch.autocast("cpu", dtype=torch.bfloat16)
            region.__enter__()  # and never left
            raise error

    return forward


class Stopped(BaseException):
    """As a KeyboardInterrupt, which pytest would take for its own."""


@pytest.mark.parametrize(
    "error", [ValueError("no such luck"), Stopped(), RuntimeError("does not require grad")], ids=repr
)
def test_models_that_raise(error: BaseException) -> None:
    model = Model(raising(error), layer=linear(4, 4))
    expected = CaptureError if isinstance(error, Exception) else Stopped
    with pytest.raises(expected):
        capture_of(model, RAISED_X)
    assert not any(module._forward_hooks for module in model.modules())
    assert operations(replayed(linear(4, 4), RAISED_X))  # and another run goes well


def test_gradients_are_taken_as_the_caller_has_them() -> None:
    """Without gradients first; with them where the model asks for some of its own, and to see if they matter."""
    seen: list[bool] = []

    def watching(self: Any, x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return self.layer(x)

    capture_of(Model(watching, layer=linear(4, 4)), RAISED_X)
    assert seen == [False, False, True]

    def forces(self: Any, x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        x.requires_grad_()
        return torch.autograd.grad(self.layer(x).square().sum(), x)[0]

    seen.clear()
    capture_of(Model(forces, layer=linear(4, 4)), RAISED_X)
    assert seen[:2] == [False, True]


class Doubling(TorchDispatchMode):
    """A mode of the model's own: a ReLU gives twice as much."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.ops.aten.relu.default else result


def written_with(self: Any, x: Tensor) -> Tensor:
    self.first.data.view(-1)[1:].mul_(2)
    torch.add(self.second.data, 1.0, out=self.second.data)
    torch.vmap(lambda row: row.add_(1.0))(self.third.data)
    with Doubling():
        return torch.relu(x) * self.first[0, 0] + self.second.sum() + self.third.sum()


@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_written_comes_back_and_modes_of_the_models_own_go_on(gradients: bool) -> None:
    model = Model(written_with, **{name: nn.Parameter(torch.ones(2, 2)) for name in ("first", "second", "third")})
    with isolate(model), torch.set_grad_enabled(gradients):
        expected = model(RAISED_X)
    with isolate(model), torch.set_grad_enabled(gradients), intercept(Handler()):
        assert torch.equal(model(RAISED_X), expected)
    assert all(torch.equal(x, torch.ones(2, 2)) for x in model.parameters())
