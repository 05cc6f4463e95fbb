"""Small training steps with a planted problem each, and four without one."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.features.rehearsal.result import Rehearsal
from tests.support.replaying import Model

Made = tuple[Callable[..., Any], list[Any]]


@dataclass
class Way:
    """How a user writes a step for one recipe, by hand: as it is in FP32, unless this says otherwise.

    dtype: of the autocast region. stored: of weights and inputs, which stay as they are without it. scale: GradScaler's first one. wide_loss: the region is around
    the model alone. islands: modules that run in FP32. prepare: what is done to the optimizer before the first step.
    """

    dtype: torch.dtype | None = None
    stored: torch.dtype | None = None
    scale: float | None = None
    wide_loss: bool = False
    islands: tuple[str, ...] = ()
    prepare: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
    models: list[nn.Module] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale or 1.0, enabled=self.scale is not None)

    def begin(self, models: Iterable[nn.Module], *optimizers: torch.optim.Optimizer) -> None:
        for model in models:
            self.models.append(model)
            if self.stored is not None:
                model.to(self.stored)
            for path in self.islands:
                one = model.get_submodule(path)
                one.forward = _wide(one.forward)  # type: ignore[method-assign]
        for optimizer in optimizers:
            self.prepare(optimizer)

    def region(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast("cuda", dtype=self.dtype)

    def given(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.stored) if self.stored is not None and x.is_floating_point() else x

    def loss(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
        with self.region():
            out = model(self.given(x))
            if not self.wide_loss:
                return loss_fn(out, y)
        return loss_fn(out.float(), y)

    def update(self, optimizer: torch.optim.Optimizer, clipped: nn.Module | None = None, clip: float = 0.0) -> None:
        if clipped is not None and clip:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(clipped.parameters(), clip)
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.skipped.append(self.scaler.get_scale() < before)


def _wide(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        with torch.autocast("cuda", enabled=False):
            return forward(x.float())

    return run


@dataclass(frozen=True)
class Case:
    """make: the step and its batches, written in some Way. broken: {recipe: kind of problem} that a rehearsal has to find; holding: recipes that have
    none; recommended: what it has to say; repaired: a remedy that has to hold."""

    make: Callable[..., Made]
    recommended: str
    broken: tuple[tuple[str, str], ...] = ()
    holding: tuple[str, ...] = ()
    repaired: str = ""


CASES: dict[str, Case] = {}


def case(recommended: str, **about: Any) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Puts what makes a step among the CASES."""

    def keep(make: Callable[..., Made]) -> Callable[..., Made]:
        CASES[make.__name__] = Case(make, recommended, **about)
        return make

    return keep


def rehearsed(name: str, steps: int, **how: Any) -> Rehearsal:
    step, batches = CASES[name].make()
    return auditor.rehearse(step, batches, steps, **how)


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
    way: Way | None = None,
) -> Any:
    """The step that everybody writes."""
    way = way or Way()
    way.begin([model], optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = way.loss(model, loss_fn, x, y)
        way.scaler.scale(loss).backward()
        way.update(optimizer, model, clip)
        return float(loss.detach())

    return step


class Gate(nn.Module):
    """Experts' shares are normalized by a sum of sigmoids, which one row of one batch makes tiny."""

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
def experts_with_a_rare_batch(way: Way | None = None) -> Made:
    model = Gate()
    batches = [(x * 0.3, y) for x, y in classes(6)]
    for x, _ in batches[3:]:
        x[0, 0] = 14.0
    return plain(model, torch.optim.SGD(model.parameters(), lr=1e-3), way=way), batches


@case("bf16_autocast", broken=(("bf16", "updates-lost"),), repaired="bf16_fp32_master_weights")
def vanishing_updates(way: Way | None = None) -> Made:
    model = mlp(16, 32, 4)
    return plain(model, torch.optim.Adam(model.parameters(), lr=1e-5), way=way), classes(8)


@case("bf16_autocast", broken=(("bf16", "decay-lost"),), repaired="bf16_stochastic_rounding")
def lost_decay(way: Way | None = None) -> Made:
    model = mlp(16, 32, 4)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1), way=way), classes(8)


@case("bf16_autocast", broken=(("bf16", "second-moment-stuck"),), repaired="bf16_kahan_sums")
def spike(way: Way | None = None) -> Made:
    model = mlp(16, 32, 4)
    batches = classes(200)
    batches[1] = batches[1][0] * 1000, batches[1][1]
    return plain(model, torch.optim.AdamW(model.parameters(), lr=3e-3), way=way), batches


@case("bf16_autocast", broken=(("as_written", "not-finite"),), repaired="as_written_fp32_master_weights")
def adam_in_fp16(way: Way | None = None) -> Made:
    model = mlp(16, 32, 4).half()
    step = plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3), way=way)
    return step, [(x.half(), y) for x, y in classes(8)]


@case(
    "bf16_autocast_islands",
    broken=(("fp16_autocast", "steps-skipped"), ("bf16_autocast", "not-finite")),
    repaired="fp16_autocast_islands",
)
def cross_entropy_by_hand(way: Way | None = None) -> Made:
    model = mlp(16, 32, 1)
    with torch.no_grad():
        model[2].weight.mul_(15)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p, y = torch.sigmoid(out.squeeze(-1)), (y > 1).float()
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()

    return plain(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss_fn, way=way), classes(8)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def adapter_that_begins_at_zero(way: Way | None = None) -> Made:
    """A frozen layer with a low-rank adapter, whose second factor begins at zero."""
    base = mlp(16, 32, 4).requires_grad_(False)
    factors = {"a": nn.Parameter(torch.randn(16, 4) / 4), "b": nn.Parameter(torch.zeros(4, 4))}
    model = Model(lambda m, x: m.base(x) + x @ m.a @ m.b, base=base, **factors)
    trained = [p for p in model.parameters() if p.requires_grad]
    return plain(model, torch.optim.Adam(trained, lr=1e-2), way=way), classes(8)


@case("bf16_autocast", broken=(("bf16", "sums-rounded"),), repaired="bf16_fp32_accumulation")
def accumulation_over_many(way: Way | None = None) -> Made:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, way = classes(4, rows=256), way or Way()
    way.begin([model], optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(x.split(1), y.split(1), strict=True):
            loss = way.loss(model, F.cross_entropy, part, wanted) / 256
            way.scaler.scale(loss).backward()
            total += float(loss.detach())
        way.update(optimizer)
        return total

    return step, batches


@case("bf16_autocast", broken=(("bf16", "loss-behind"),), holding=("fp16_autocast",))
def raw_inputs_into_batch_norm(way: Way | None = None) -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return plain(model, torch.optim.Adam(model.parameters(), lr=1e-2), way=way), [(x + 1000, y) for x, y in classes(8)]


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def adversarial_pair(way: Way | None = None) -> Made:
    torch.manual_seed(0)
    maker, critic = mlp(8, 32, 16), mlp(16, 32, 1)
    made, judged = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, critic))
    way = way or Way()
    way.begin([maker, critic], made, judged)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        noise = way.given(torch.randn(len(x), 8))
        judged.zero_grad()
        with way.region():
            real, fake = critic(way.given(x)), critic(maker(noise).detach())
            loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        way.scaler.scale(loss).backward()
        way.update(judged)
        made.zero_grad()
        with way.region():
            fooled = F.softplus(-critic(maker(noise))).mean()
        way.scaler.scale(fooled).backward()
        way.update(made)
        return float(loss.detach())

    return step, classes(8)


class _Detour(torch.autograd.Function):
    """Its backward pass is 4096 times larger inside than at its ends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (gradient * 4096) / 4096


def detour() -> nn.Module:
    torch.manual_seed(0)
    return Model(lambda m, x: m.b(_Detour.apply(m.a(x))), a=nn.Linear(16, 32), b=nn.Linear(32, 4))


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def function_of_its_own(way: Way | None = None) -> Made:
    model = detour()
    return plain(model, torch.optim.Adam(model.parameters(), lr=3e-3), way=way), classes(8)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clipping(way: Way | None = None) -> Made:
    model = mlp(16, 32, 4)
    with torch.no_grad():
        model[2].weight.mul_(30)
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=0.5, way=way), classes(8)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clean_mlp(way: Way | None = None) -> Made:
    model = mlp(16, 64, 32, 4)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=3e-3), way=way), classes(16)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clean_momentum(way: Way | None = None) -> Made:
    model = mlp(16, 64, 4)
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), way=way), classes(16)


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clean_convolutions(way: Way | None = None) -> Made:
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
    return plain(model, torch.optim.Adam(model.parameters(), lr=2e-3), way=way), batches


def characters(m: Any, ids: torch.Tensor) -> torch.Tensor:
    """A language model of one block."""
    mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
    return m.head(m.block(m.embed(ids), src_mask=mask, is_causal=True))


@case("bf16_autocast", holding=("bf16_autocast", "fp16_autocast"))
def clean_language_model(way: Way | None = None) -> Made:
    torch.manual_seed(0)
    embed = nn.Embedding(32, 32)
    block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
    model = Model(characters, embed=embed, block=block, head=nn.Linear(32, 32))
    text = torch.tensor([b % 32 for b in (torch.__doc__ or "").encode() * 40])[:4096]
    starts = torch.randint(0, len(text) - 33, (16, 8), generator=torch.Generator().manual_seed(0))
    windows = [torch.stack([text[s : s + 33] for s in row]) for row in starts.tolist()]

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    return plain(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn, way=way), [
        (w[:, :-1], w[:, 1:]) for w in windows
    ]
