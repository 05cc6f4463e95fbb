"""Products of a first run in a second one: taken where all they read is the same, and computed where anything is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from auditor.imitation import imitated
from auditor.ops import remembered as remembered_module
from auditor.ops.remembered import Products, first_run, remembered, second_run
from auditor.runs.answer import answer
from auditor.verify.running import answers_of
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
    with first_run(products):
        (plain,) = answer(model, ((x,), {}), around=imitated)
    with second_run(products):
        (graded,) = answer(model, ((x,), {}), around=imitated, gradients=True)
    return plain, graded


def test_all_products_are_taken_where_both_runs_are_the_same() -> None:
    products = Products()
    plain, graded = both(seeded(Net), normal(256, WIDE), products)
    assert torch.equal(plain, graded)
    assert products.taken == 3 and not any(products.known.values())


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
    with first_run(products):
        remembered(lambda: given, lambda x: x, "product", torch.ones(2)).zero_()
    with second_run(products):
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
    with first_run(products):
        remembered(lambda: x, lambda x: x, x)
    with second_run(products):
        for other in (x.t(), x.t().contiguous().t(), x.view(4, 16), x.double(), -x, x.bfloat16()):
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


@pytest.mark.parametrize("alike", [False, True])
def test_answers_are_the_same_whether_products_are_shared(alike: bool) -> None:
    x = normal(256, WIDE)
    found = answers_of(seeded(Net), [((x,), {})], "cpu", alike=alike)
    expected = answer(seeded(Net), ((x,), {}), around=imitated)
    assert not isinstance(found, str) and found.graded is not None
    assert torch.equal(found.outputs[0][0], expected[0]) and found.graded[0] is found.outputs[0][0]


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
    assert torch.equal(plain, graded) and products.taken == 2 and not any(products.known.values())
    model = seeded(Recurrent)
    with first_run(products):
        answer(model, ((normal(6, 2, 8),), {}), around=imitated)
    with torch.no_grad():
        model.b.weight_hh_l0[0, 0] += 1
    with second_run(products):
        (found,) = answer(model, ((normal(6, 2, 8),), {}), around=imitated)
    assert products.taken == 3 and not torch.equal(found, plain)


def test_a_recurrent_layer_that_drops_some_of_its_values_draws_anew() -> None:
    products = Products()
    plain, graded = both(seeded(lambda: Recurrent(0.5)).train(), normal(6, 2, 8), products)
    assert torch.equal(plain, graded) and products.taken == 1
