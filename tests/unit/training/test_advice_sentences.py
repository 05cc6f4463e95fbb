"""Numbers of the advice on training, held against autograd and against steps of its own."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from auditor.records.training import Training
from tests.unit.training.conftest import Trained, loss_fn
from tests.unit.training.own_steps import audited, fp32_gradients


def advice(training: Training, code: str) -> str:
    return next(a.text for a in training.advice if a.code == code)


def test_numbers_of_advice_are_those_of_autograd(trained: Trained) -> None:
    training = trained.audit.training
    assert training is not None and training.fp16 is not None and training.fp16.init is not None
    model = copy.deepcopy(trained.before)
    model.dropout.p = 0.0
    _, found = audited(model, trained.batch, loss_fn)
    gradients = fp32_gradients(model, trained.batch, loss_fn)
    whole = torch.cat([g.flatten() for g in gradients.values()])
    norm = float(whole.norm())
    clip = advice(found, "clip-after-unscale")
    assert f"The gradient norm is {norm:.3g}; before" in clip
    assert f"it reads {norm * found.fp16.init:.3g}" in clip
    ranks = re.search(r"the sum of (\d+) equal gradients overflows FP16", advice(found, "reduce-dtype"))
    largest = float(whole.abs().max()) * found.fp16.init
    assert largest * int(ranks[1]) == pytest.approx(65504, rel=0.02)
    eps = re.search(r"(\S+)% of the squared gradients would be too", advice(found, "adam-eps"))
    nonzero = whole[whole != 0]
    assert float(eps[1]) == pytest.approx(100 * float((nonzero.square().half() == 0).float().mean()), abs=1.0)


def test_an_embedding_makes_the_share_that_is_said() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(x.detach() + 50 * (x - x.detach()))

    torch.manual_seed(0)
    model, batch = Lookup(), (torch.randint(0, 8, (4, 6)), torch.randn(4, 6, 8))
    _, training = audited(model, batch, nn.functional.mse_loss, strategies=("autocast",))
    gradients = {n: float(g.square().sum()) for n, g in fp32_gradients(model, batch, nn.functional.mse_loss).items()}
    share = gradients["embed.weight"] / sum(gradients.values())
    assert advice(training, "embedding-dominates").startswith(f"It makes {share:.0%} of the squared gradient norm.")


def test_a_backward_pass_that_overflows_is_said_with_how_many_gradients() -> None:
    """Roots of what FP16 flushes to zero: their slope is infinite there, and 1e5 at most in FP32."""

    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1e-9, 1.0, 1.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            return (x.abs() * self.scale).sqrt()

    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    _, training = audited(Roots(), (x,), lambda y: y.mean(), formats=("fp16",))
    low = (x * Roots().scale.detach()).half().requires_grad_()
    low.sqrt().backward(torch.full_like(low, 1 / x.numel()))
    broken = int(low.grad.isinf().sum())
    assert broken == 6
    said = advice(training, "backward-fails")
    assert said.startswith("sqrt")
    assert said.endswith(
        f": its backward pass turns {broken} finite gradients into Inf or NaN in FP16, and the gradient of scale with them."
    )
    rounded = (x * Roots().scale.detach()).half().float()
    scale = torch.ones(4, requires_grad=True)
    (rounded * scale).sqrt().mean().backward()
    assert scale.grad is not None and not scale.grad.isfinite().all()


def test_what_moves_with_the_batch_is_said_with_the_numbers_of_parts() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    torch.manual_seed(0)
    model, batch = Layer(), (0.01 * torch.randn(16, 8), torch.randn(16, 8))
    _, training = audited(model, batch, nn.functional.mse_loss, strategies=("autocast",))

    def largest(rows: slice) -> float:
        plain = copy.deepcopy(model)
        y = plain(batch[0][rows])
        y.retain_grad()
        nn.functional.mse_loss(y, batch[1][rows]).backward()
        return max(float(g.abs().max()) for g in (y.grad, *(p.grad for p in plain.parameters())) if g is not None)

    said = advice(training, "batch-size")
    found = re.match(r"From (\d+) to (\d+) samples .*the largest gradient falls from (\S+) to (\S+);", said)
    assert found is not None, said
    assert (int(found[1]), int(found[2])) == (4, 16)
    assert float(found[3]) == pytest.approx(max(largest(slice(0, 4)), largest(slice(4, 8))), rel=0.06)
    assert float(found[4]) == pytest.approx(largest(slice(0, 16)), rel=0.06)


def test_a_sum_over_ranks_is_said_where_it_stands(tmp_path: Path) -> None:
    """It stays in the dtype that it is given: what two ranks hold would be added in FP16."""
    from torch import distributed
    from torch.distributed import _functional_collectives as collectives

    class Gathered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return collectives.all_reduce(self.layer(x), "sum", distributed.group.WORLD) * 1.0

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        half = collectives.all_reduce(torch.ones(3, dtype=torch.float16), "sum", distributed.group.WORLD)
        assert half.dtype is torch.float16
        batch = (torch.randn(4, 8), torch.randn(4, 8))
        _, training = audited(Gathered(), batch, nn.functional.mse_loss, strategies=("autocast",), formats=("bf16",))
    finally:
        distributed.destroy_process_group()
    said = advice(training, "low-collective")
    assert re.match(rf"\S*all_reduce\S* at {Path(__file__).name}:\d+ adds what the ranks hold in the dtype", said), said


def test_a_layer_far_above_the_others_is_said_with_its_factor() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                y = layer(x if i != 2 else x.detach())
                x = x + (y if i != 2 else y.detach() + 300 * (y - y.detach()))
            return x

    torch.manual_seed(0)
    model, batch = Steep(), (torch.randn(4, 8), torch.randn(4, 8))
    _, training = audited(model, batch, nn.functional.mse_loss, strategies=("autocast",))
    squares: dict[str, float] = {}
    for name, g in fp32_gradients(model, batch, nn.functional.mse_loss).items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + float(g.square().sum())
    norms = {module: value**0.5 for module, value in squares.items()}
    middle = sorted(norms.values())[2]
    said = advice(training, "gradient-outliers")
    assert said.startswith(f"Against the median of {middle:.2g}: layers.2 ({norms['layers.2'] / middle:.0f} times)")
