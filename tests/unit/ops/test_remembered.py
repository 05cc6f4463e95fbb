"""Products of a first run in a second one: taken where all they read is the same, and computed where anything is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from auditor.imitation import imitated
from auditor.ops import remembered as remembered_module
from auditor.ops.remembered import Products, remembered, remembering
from auditor.runs.answer import answer
from tests.subjects import normal, seeded

WIDE = 128


class Net(nn.Module):
    """Two linear layers and a convolution under autocast. otherwise: what it does to its input with gradients enabled."""

    def __init__(self, otherwise: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.c, self.otherwise = nn.Conv2d(WIDE, WIDE, 1), otherwise

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            y = self.a(self.otherwise(x) if torch.is_grad_enabled() else x).relu_()
            z: Tensor = self.c(y.t().reshape(1, WIDE, 16, 16))
            return self.b(z.flatten(2)[0].t())


def both(model: nn.Module, x: Tensor, products: Products) -> tuple[Tensor, Tensor]:
    """What a first run answers, and one with gradients enabled that takes from it."""
    with remembering(products):
        (plain,) = answer(model, ((x,), {}), around=imitated)
    with remembering(products, last=True):
        (graded,) = answer(model, ((x,), {}), around=imitated, gradients=True)
    return plain, graded


def test_all_products_are_taken_where_both_runs_are_the_same() -> None:
    products = Products()
    plain, graded = both(seeded(Net), normal(256, WIDE), products)
    assert torch.equal(plain, graded)
    assert products.taken == 3 and not products.known and products.bytes == 0


@pytest.mark.parametrize("change", [lambda x: x * 1.01, lambda x: x.flip(0), lambda x: x.half().float() + 1e-2])
def test_what_reads_anything_else_is_computed(change: Callable[[Tensor], Tensor]) -> None:
    products, x = Products(), normal(256, WIDE)
    model = seeded(lambda: Net(change))
    _, graded = both(model, x, products)
    assert products.taken == 0
    assert torch.equal(graded, answer(model, ((x,), {}), around=imitated, gradients=True)[0])


def test_a_result_that_is_written_to_is_taken_as_it_was() -> None:
    products = Products()
    given = torch.ones(4)
    with remembering(products):
        remembered(lambda: given, lambda x: x, "product", torch.ones(2)).zero_()
    with remembering(products, last=True):
        found = remembered(lambda: pytest.fail("computed again"), lambda x: x, "product", torch.ones(2))
    assert found.tolist() == [1, 1, 1, 1]


class Attending(nn.Module):
    """Attention under autocast; written: how it is called."""

    def __init__(self, written: Callable[[Tensor, Tensor], Tensor], otherwise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.written, self.otherwise = nn.Linear(WIDE, WIDE), written, otherwise

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            y = self.project(x).unflatten(-1, (4, -1)).transpose(0, 1)
            return self.written(y, self.otherwise(y) if torch.is_grad_enabled() else y)


attend = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize(
    ("written", "otherwise", "taken"),
    [
        (lambda q, k: attend(q, k, k), lambda k: k, 1),
        (lambda q, k: attend(q, k, k, is_causal=True), lambda k: k, 1),
        (lambda q, k: attend(q, k, k, (k[..., :1] > 0).mT), lambda k: k, 1),
        (lambda q, k: attend(q, k, k), lambda k: k.flip(1), 0),
        (lambda q, k: attend(q, k, k, scale=0.5 if torch.is_grad_enabled() else 0.1), lambda k: k, 0),
        (lambda q, k: attend(q, q, q, k[..., :1].mT), lambda k: k.flip(1), 0),  # the mask is another
        (
            lambda q, k: attend(q, k, k, k[..., :1].mT),
            lambda k: k,
            0,
        ),  # the mask has a gradient: another kernel adds it
        (lambda q, k: attend(q[:, :8], k, k), lambda k: k, 0),  # few read much
        (lambda q, k: attend(q, k, k, dropout_p=0.5), lambda k: k, 0),
    ],
)
def test_attention_is_taken_where_it_reads_the_same(
    written: Callable[[Tensor, Tensor], Tensor], otherwise: Callable[[Tensor], Tensor], taken: int
) -> None:
    products, x = Products(), normal(256, WIDE)
    model = seeded(lambda: Attending(written, otherwise))
    plain, graded = both(model, x, products)
    assert products.taken == 1 + taken
    assert torch.equal(graded, answer(model, ((x,), {}), around=imitated, gradients=True)[0])
    assert not taken or torch.equal(plain, graded)


def test_what_is_laid_out_otherwise_is_another() -> None:
    products, x = Products(), normal(8, 8)
    with remembering(products):
        remembered(lambda: x, lambda x: x, x)
    with remembering(products, last=True):
        for other in (x.t(), x.t().contiguous().t(), x.view(4, 16), x.view(torch.int32), x.double(), -x, x.bfloat16()):
            remembered(lambda: x, lambda x: pytest.fail("taken"), other)
        assert remembered(lambda: pytest.fail("computed again"), lambda x: x + 1, x.clone()) is not x


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.ops.remembered._MOST", 2 * 256 * WIDE)
    products = Products()
    plain, graded = both(seeded(Net), normal(256, WIDE), products)
    assert torch.equal(plain, graded) and products.taken == 1


def test_inside_vmap_everything_is_computed() -> None:
    layer, x = seeded(lambda: nn.Linear(WIDE, WIDE)), normal(2, 256, WIDE)

    class Mapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.float16):
                found: Tensor = torch.vmap(layer)(x)
            return found

    plain, graded = both(Mapped(), x, Products())
    assert torch.equal(plain, graded)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 8 * 65536, 8 * 65536 + 5, 3 * 8 * 65536])
def test_a_byte_that_is_another_is_told_wherever_it_is(size: int) -> None:
    content = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    known = remembered_module._digest(content)
    assert remembered_module._digest(content.copy()) == known
    for place in {0, size // 3, size // 2, size - 9, size - 1} & set(range(size)):
        for bit in range(8):
            other = content.copy()
            other[place] ^= 1 << bit
            assert remembered_module._digest(other) != known
    if size > 1:
        assert remembered_module._digest(np.roll(content, 1)) != known


@pytest.mark.parametrize("quarter", range(4))
def test_what_differs_in_one_quarter_of_the_words_alone_is_told(quarter: int) -> None:
    """Sixteen-bit values that two exchange, or that move from one to another: of 4,000 such pairs none agree."""
    values = np.random.default_rng(2).integers(-100, 100, (1024, 4)).astype(np.int16)
    seen = {remembered_module._digest(values.reshape(-1).view(np.uint8))}
    for i in range(4000):
        other = values.copy()
        there, here = i % 1023 + 1, (7 * i) % (i % 1023 + 1)
        other[there, quarter] += 1 + i // 1023
        other[here, quarter] -= 1 + i // 1023
        seen.add(remembered_module._digest(other.reshape(-1).view(np.uint8)))
    assert len(seen) == 4001


class Recurrent(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.GRU(8, 8, 2, dropout=dropout), nn.LSTM(8, 4, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            y, h = self.a(x)
            z, (_, c) = self.b(y.mul_(2))
            return z + c.sum() + h.sum()


def test_recurrent_layers_are_taken_with_all_that_they_return() -> None:
    products = Products()
    plain, graded = both(seeded(Recurrent), normal(6, 2, 8), products)
    assert torch.equal(plain, graded) and products.taken == 2 and not products.known
    model = seeded(Recurrent)
    with remembering(products):
        answer(model, ((normal(6, 2, 8),), {}), around=imitated)
    with torch.no_grad():
        model.b.weight_hh_l0[0, 0] += 1
    with remembering(products, last=True):
        (found,) = answer(model, ((normal(6, 2, 8),), {}), around=imitated)
    assert products.taken == 3 and not torch.equal(found, plain)


def test_a_recurrent_layer_that_drops_some_of_its_values_draws_anew() -> None:
    products = Products()
    plain, graded = both(seeded(lambda: Recurrent(0.5)).train(), normal(6, 2, 8), products)
    assert torch.equal(plain, graded) and products.taken == 1


def keyed(net: Any, x: Tensor) -> Tensor:
    """Arguments by their names, the third of which has more entries than are printed."""
    bias = net.own.repeat(16)
    found: Tensor = torch.ops.aten.linear.default(x, net.weight.repeat(16, 1), bias=bias)
    return found


def written(net: Any, x: Tensor) -> Tensor:
    """One product twice, and what it gave and read is written to in between."""
    first = net(x)
    kept = first.clone()
    first.mul_(2)
    second = net(x)
    x.add_(1)
    return torch.stack([kept, second, net(x)])


def derived(net: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = net(x)
        (once,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(once.sum(), x)
    return torch.stack([y, twice]).detach()


def without_history(net: Any, x: Tensor) -> Tensor:
    """Inference mode where no gradients are on; what comes of it is written to only where they are."""
    with torch.inference_mode(not torch.is_grad_enabled()):
        y: Tensor = net(x)
        return y.relu_().clone()


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda net, x: net(net(x).relu_()),
    "keywords": keyed,
    "written": written,
    "drops": lambda net, x: net(torch.dropout(net(x), 0.5, True)),
    "noise": lambda net, x: net(net(x) + torch.randn_like(x)),
    "derivatives": derived,
    "without history": without_history,
    "turned": lambda net, x: net(net(x).t()),
    "two formats": lambda net, x: net(x) + torch.autocast("cuda", torch.bfloat16)(net)(x),
    "a view": lambda net, x: net(x.unsqueeze(0).expand(2, -1, -1))[0],
    "attention": lambda net, x: attend(
        net(x)[None, None], net(x)[None, None], net(x)[None, None], scale=net.own[:1].item()
    )[0, 0],
}


def change_data(net: Any) -> None:
    net.weight.data[0, 0] += 0.5


def change_bytes(net: Any) -> None:
    net.weight.detach().numpy()[-1, -1] += 0.5


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "a bias": lambda net: net.own.view(-1)[WIDE // 2].add_(1),
    "behind torch's back": change_bytes,
    "data": change_data,
    "layout": lambda net: setattr(net.weight, "data", net.weight.data.t().contiguous().t()),
    "format": lambda net: setattr(net, "dtype", torch.bfloat16),
    "stored low": lambda net: setattr(net.weight, "data", net.weight.data.half().float()),
    "signs": lambda net: setattr(net.weight, "data", net.weight.data * -1),
}


class Plain(nn.Linear):
    """A layer, and what is made of it."""

    def __init__(self, made: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(WIDE, WIDE)
        self.made, self.dtype, self.low = made, torch.float16, False
        self.register_buffer("own", torch.ones(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        if self.low:
            return torch.nn.functional.linear(x, self.weight, self.bias + self.own)
        self.low = True
        with torch.autocast("cuda", self.dtype):
            return self.made(self, x).float()


class Dual(nn.Module):
    """A layer, and how it changes along a direction: derivatives that are taken along with the run."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16), forward_ad.dual_level():
            along = self.project(forward_ad.make_dual(x, torch.ones_like(x)))
            return forward_ad.unpack_dual(along).tangent


def test_derivatives_that_are_taken_along_are_not_lost() -> None:
    products, x = Products(), normal(256, WIDE)
    model = seeded(Dual)
    plain, graded = both(model, x, products)
    assert torch.equal(plain, graded)
    assert torch.allclose(plain[0].float(), model.project.weight.sum(1), rtol=1e-2, atol=1e-2)
