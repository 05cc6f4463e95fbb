"""Training steps of public repositories, rebuilt small with their losses, optimizers, clipping and accumulation."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.features.rehearsal.cases import Made, Way
from tests.support.replaying import Model

STEPS: dict[str, Callable[..., Made]] = {}


def public(make: Callable[..., Made]) -> Callable[..., Made]:
    STEPS[make.__name__] = make
    return make


def images(count: int, rows: int, size: int = 8) -> list[torch.Tensor]:
    """Batches [rows, 1, size, size] of smooth images in 0..1."""
    generator = torch.Generator().manual_seed(1)
    coarse = [torch.rand(rows, 1, 3, 3, generator=generator) for _ in range(count)]
    return [F.interpolate(x, size, mode="bilinear", align_corners=True) for x in coarse]


class Block(nn.Module):
    """nanoGPT's block: causal attention and a feed-forward layer, both after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        parts = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (one.view(b, t, self.heads, c // self.heads).transpose(1, 2) for one in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT's model, with tied embeddings."""

    def __init__(self, vocabulary: int = 48, length: int = 16, width: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@public
def nanogpt(way: Way) -> Made:
    """karpathy/nanoGPT: AdamW with two groups, four micro-batches, gradients clipped to 1."""
    torch.manual_seed(0)
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    way.begin([model], optimizer)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.view(-1, out.size(-1)), y.view(-1))

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        total = 0.0
        for part, target in zip(x.split(4), y.split(4), strict=True):
            loss = way.loss(model, loss_fn, part, target) / 4
            way.scaler.scale(loss).backward()
            total += float(loss.detach())
        way.update(optimizer, model, 1.0)
        optimizer.zero_grad(set_to_none=True)
        return total

    generator = torch.Generator().manual_seed(1)
    starts = [torch.randint(48, (16, 1), generator=generator) for _ in range(4)]
    texts = [(start + torch.arange(17) * 5) % 48 for start in starts]
    return step, [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


class VAE(nn.Module):
    """The model of pytorch/examples/vae."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 48), nn.Linear(48, 6), nn.Linear(48, 6)
        self.fc3, self.fc4 = nn.Linear(6, 48), nn.Linear(48, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, 64)))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        std = torch.exp(0.5 * log_variance)
        z = mean + torch.randn_like(std) * std
        return self.fc4(F.relu(self.fc3(z))), mean, log_variance


@public
def vae(way: Way) -> Made:
    """pytorch/examples/vae, with logits as autocast asks for: a sum over a batch, so that gradients are large."""
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    way.begin([model], optimizer)

    def loss_fn(out: Any, x: torch.Tensor) -> torch.Tensor:
        logits, mean, log_variance = out
        error = F.binary_cross_entropy_with_logits(logits.float(), x.view(-1, 64), reduction="sum")
        return error - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        with way.region():
            loss = loss_fn(model(way.given(x)), x)
        way.scaler.scale(loss).backward()
        way.update(optimizer)
        return float(loss.detach())

    return step, images(4, 32)


class Detector(nn.Module):
    """A fully convolutional detector without anchors: a class and a box for each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.classes, self.boxes = nn.Conv2d(16, 3, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        nn.init.constant_(self.classes.bias, -2.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return self.classes(features).flatten(2).transpose(1, 2), self.boxes(features).flatten(2).transpose(1, 2)


@public
def detector(way: Way) -> Made:
    """RetinaNet's losses: a sigmoid focal loss over all cells, and smooth L1 of the boxes of cells with an object, both over
    the number of these cells; SGD with momentum."""
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    way.begin([model], optimizer)

    def loss_fn(out: Any, labels: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        logits, offsets = out
        target = F.one_hot(labels, 4)[..., 1:].float()
        p = torch.sigmoid(logits.float())
        each = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
        missed = p * (1 - target) + (1 - p) * target
        weight = 0.25 * target + 0.75 * (1 - target)
        is_object = labels > 0
        count = is_object.sum().clamp(min=1)
        focal = (weight * missed**2 * each).sum() / count
        return focal + F.smooth_l1_loss(offsets.float()[is_object], boxes[is_object], reduction="sum") / count

    def step(x: torch.Tensor, labels: torch.Tensor, boxes: torch.Tensor) -> float:
        optimizer.zero_grad()
        with way.region():
            loss = loss_fn(model(way.given(x)), labels, boxes)
        way.scaler.scale(loss).backward()
        way.update(optimizer)
        return float(loss.detach())

    generator = torch.Generator().manual_seed(2)
    batches = []
    for x in images(4, 16):
        labels = torch.randint(4, (16, 16), generator=generator) * (torch.rand(16, 16, generator=generator) < 0.2)
        batches.append((x, labels, torch.randn(16, 16, 4, generator=generator)))
    return step, batches


@public
def diffusion(way: Way) -> Made:
    """lucidrains/denoising-diffusion-pytorch: noise predicted at random times, gradients clipped to 1, an average of the
    weights in FP32, two micro-batches."""
    torch.manual_seed(0)

    def forward(m: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = F.silu(m.enter(x) + m.time(t)[:, :, None, None])
        return m.leave(h + F.silu(m.norm(m.middle(h))))

    parts = {"enter": nn.Conv2d(1, 16, 3, padding=1), "middle": nn.Conv2d(16, 16, 3, padding=1)}
    model = Model(
        forward, **parts, norm=nn.GroupNorm(4, 16), leave=nn.Conv2d(16, 1, 3, padding=1), time=nn.Embedding(100, 16)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    average = copy.deepcopy(model).requires_grad_(False)
    way.begin([model], optimizer)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.1, 100), 0)

    def step(x: torch.Tensor) -> float:
        total = 0.0
        for part in x.split(16):
            t, noise = torch.randint(100, (len(part),)), torch.randn(part.shape)
            share = kept[t][:, None, None, None]
            noisy = share.sqrt() * (2 * part - 1) + (1 - share).sqrt() * noise
            with way.region():
                loss = F.mse_loss(model(way.given(noisy), t).float(), noise) / 2
            way.scaler.scale(loss).backward()
            total += float(loss.detach())
        way.update(optimizer, model, 1.0)
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p.float(), 0.005)
        return total

    return step, images(4, 32)


@public
def gan(way: Way) -> Made:
    """pytorch/examples/dcgan: a critic of real and made images, each with its own backward pass, then the maker."""
    torch.manual_seed(0)
    maker = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4, bias=False), nn.Flatten(0)
    )
    for p in (*maker.parameters(), *critic.parameters()):
        if p.dim() > 1:
            nn.init.normal_(p, 0.0, 0.1)
    judged = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    made = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
    way.begin([maker, critic], judged, made)

    def loss_of(x: torch.Tensor, label: float) -> torch.Tensor:
        with way.region():
            out = critic(way.given(x))
            return F.binary_cross_entropy_with_logits(out.float(), torch.full(out.shape, label))

    def step(x: torch.Tensor) -> float:
        judged.zero_grad()
        real = loss_of(2 * x - 1, 1.0)
        way.scaler.scale(real).backward()
        with way.region():
            fake = maker(way.given(torch.randn(len(x), 8, 1, 1)))
        wrong = loss_of(fake.detach(), 0.0)
        way.scaler.scale(wrong).backward()
        way.update(judged)
        made.zero_grad()
        fooled = loss_of(fake, 1.0)
        way.scaler.scale(fooled).backward()
        way.update(made)
        return float((real + wrong).detach())

    return step, images(4, 32)
