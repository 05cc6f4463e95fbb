"""Small training steps with a planted problem each, and four without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[Callable[..., Any], list[Any]]


@dataclass(frozen=True)
class Case:
    """make: the step and its batches. broken: {recipe: kind of problem} that a rehearsal has to find; holding: recipes that have
    none; recommended: what it has to say; repaired: a remedy that has to hold."""

    make: Callable[[], Made]
    recommended: str
    broken: tuple[tuple[str, str], ...] = ()
    holding: tuple[str, ...] = ()
    repaired: str = ""


CASES: dict[str, Case] = {}


def case(recommended: str, **about: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Puts what makes a step among the CASES."""

    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        CASES[make.__name__] = Case(make, recommended, **about)
        return make

    return keep


def classes(count: int, rows: int = 32, features: int = 16, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of points and the class of each, by a random linear map."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randn(features, 4, generator=generator)
    points = [torch.randn(rows, features, generator=generator) for _ in range(count)]
    return [(x, (x @ chosen).argmax(-1)) for x in points]


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., torch.Tensor] = F.cross_entropy,
    clip: float = 0.0,
) -> Any:
    """The step that everybody writes."""

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.item()

    return step


class Gate(nn.Module):
    """Experts' shares are normalised by a sum of sigmoids, which one row of one batch makes tiny."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.gate, self.b = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 4)
        with torch.no_grad():
            self.gate.weight.mul_(0.3)
            self.gate.weight[:, 0] = -1
            self.a.weight.copy_(torch.eye(16))
            self.a.bias.zero_()
            self.gate.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.sigmoid(self.gate(self.a(x)))
        return self.b(q / (q[:, 0:1] + q[:, 1:2] + q[:, 2:3] + q[:, 3:4]))


@case("bf16_autocast", broken=(("fp16_autocast", "steps-skipped"),))
def experts_with_a_rare_batch() -> Made:
    model = Gate()
    batches = [(x * 0.3, y) for x, y in classes(6)]
    for x, _ in batches[3:]:
        x[0, 0] = 14.0
    return plain(model, torch.optim.SGD(model.parameters(), lr=1e-3)), batches


@case("bf16_autocast", broken=(("bf16", "updates-lost"),), repaired="bf16_fp32_master_weights")
def vanishing_updates() -> Made:
    model = mlp(16, 32, 4)
    return plain(model, torch.optim.Adam(model.parameters(), lr=1e-5)), classes(8)


@case("bf16_autocast", broken=(("bf16", "decay-lost"),), repaired="bf16_stochastic_rounding")
def lost_decay() -> Made:
    model = mlp(16, 32, 4)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)), classes(8)


@case("bf16_autocast", broken=(("bf16", "second-moment-stuck"),), repaired="bf16_kahan_sums")
def spike() -> Made:
    model = mlp(16, 32, 4)
    batches = classes(200)
    batches[1] = batches[1][0] * 1000, batches[1][1]
    return plain(model, torch.optim.AdamW(model.parameters(), lr=3e-3)), batches


@case("bf16_autocast", broken=(("as_written", "not-finite"),), repaired="as_written_eps")
def adam_in_fp16() -> Made:
    model = mlp(16, 32, 4).half()
    step = plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return step, [(x.half(), y) for x, y in classes(8)]


@case(
    "bf16_autocast_loss_in_fp32",
    broken=(("fp16_autocast", "steps-skipped"), ("bf16_autocast", "not-finite")),
    repaired="fp16_autocast_loss_in_fp32",
)
def cross_entropy_by_hand() -> Made:
    model = mlp(16, 32, 1)
    with torch.no_grad():
        model[2].weight.mul_(15)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p, y = torch.sigmoid(out.squeeze(-1)), (y > 1).float()
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()

    return plain(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss_fn), classes(8)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, whose second factor begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = mlp(16, 32, 4).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(16, 4) / 4), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a @ self.b


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def adapter_that_begins_at_zero() -> Made:
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    return plain(model, torch.optim.Adam(trained, lr=1e-2)), classes(8)


@case("bf16_autocast", broken=(("bf16", "sums-rounded"),), repaired="bf16_fp32_accumulation")
def accumulation_over_many() -> Made:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = classes(4, rows=256)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        for part, wanted in zip(x.split(1), y.split(1), strict=True):
            (F.cross_entropy(model(part), wanted) / 256).backward()
        optimizer.step()

    return step, batches


@case("bf16_autocast", broken=(("bf16", "loss-behind"),), holding=("fp16_autocast",))
def raw_inputs_into_batch_norm() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return plain(model, torch.optim.Adam(model.parameters(), lr=1e-2)), [(x + 1000, y) for x, y in classes(8)]


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def adversarial_pair() -> Made:
    torch.manual_seed(0)
    maker, critic = mlp(8, 32, 16), mlp(16, 32, 1)
    made, judged = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, critic))

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        noise = torch.randn(len(x), 8)
        judged.zero_grad()
        real, fake = critic(x), critic(maker(noise).detach())
        loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        loss.backward()
        judged.step()
        made.zero_grad()
        F.softplus(-critic(maker(noise))).mean().backward()
        made.step()
        return loss.item()

    return step, classes(8)


class _Detour(torch.autograd.Function):
    """Its backward pass is 4096 times larger inside than at its ends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (gradient * 4096) / 4096


class Detour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(_Detour.apply(self.a(x)))


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def function_of_its_own() -> Made:
    model = Detour()
    return plain(model, torch.optim.Adam(model.parameters(), lr=3e-3)), classes(8)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clipping() -> Made:
    model = mlp(16, 32, 4)
    with torch.no_grad():
        model[2].weight.mul_(30)
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=0.5), classes(8)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clean_mlp() -> Made:
    model = mlp(16, 64, 32, 4)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=3e-3)), classes(16)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clean_momentum() -> Made:
    model = mlp(16, 64, 4)
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)), classes(16)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clean_convolutions() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    model(torch.zeros(2, 1, 8, 8))
    batches = [(x.view(-1, 1, 8, 8), y) for x, y in classes(8, features=64)]
    return plain(model, torch.optim.Adam(model.parameters(), lr=2e-3)), batches


class Characters(nn.Module):
    """A language model of one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(self.embed(ids), src_mask=mask, is_causal=True))


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clean_language_model() -> Made:
    model = Characters()
    text = torch.tensor([b % 32 for b in (torch.__doc__ or "").encode() * 40])[:4096]
    starts = torch.randint(0, len(text) - 33, (16, 8), generator=torch.Generator().manual_seed(0))
    windows = [torch.stack([text[s : s + 33] for s in row]) for row in starts.tolist()]

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    return plain(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn), [
        (w[:, :-1], w[:, 1:]) for w in windows
    ]
