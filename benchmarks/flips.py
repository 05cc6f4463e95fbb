"""Flips that margins predict against flips that are counted: `python -m benchmarks.flips` prints the table of docs/generation.md.

Five models, trained here in seconds, are run in BF16 by torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.measure.decisions import measure_decisions
from auditor.measure.rerun import PLAIN
from tests.support.subjects import measurement_of

Choice = tuple[Tensor, ...]
"""What a model decided: of every operation that decides, in order, the chosen entries [rows, k]."""


class Language(nn.Module):
    """Two blocks of attention over 30 characters; it answers with the likeliest next one, read from an embedding of answers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(30, 64), nn.Embedding(64, 64), nn.Linear(64, 30)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2))

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            q, k, v = F.linear(x, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(3, -1)
            q, k, v = (z.unflatten(-1, (4, 16)).transpose(1, 2) for z in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = layer.norm1(x + layer.self_attn.out_proj(seen))
            x = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
        return self.head(x)

    def forward(self, ids: Tensor) -> tuple[Tensor, Choice]:
        best = self.logits(ids).argmax(-1)
        return self.embed(best), (best.reshape(-1, 1),)


class Experts(nn.Module):
    """Three layers of a mixture of eight experts, two for each row, each beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 64), nn.Linear(64, 8)
        self.routers = nn.ModuleList(nn.Linear(64, 8, bias=False) for _ in range(3))
        self.up, self.down = (nn.Parameter(torch.randn(3, 8, 64, 64) / 8) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))

    def forward(self, x: Tensor, held: Choice = ()) -> tuple[Tensor, Choice]:
        """held: what layers decided in another run; an empty tensor where a layer decides by itself."""
        x, decided = torch.tanh(self.enter(x)), []
        for i, (router, norm) in enumerate(zip(self.routers, self.norms, strict=True)):
            y = norm(x)
            scores = router(y)
            best = scores.topk(2, -1)[1]
            chosen = held[i] if held and held[i].numel() else best
            weights = scores.gather(-1, chosen).softmax(-1)
            each = torch.einsum("nef,efd->ned", torch.relu(torch.einsum("nd,edf->nef", y, self.up[i])), self.down[i])
            taken = each.gather(1, chosen[..., None].expand(-1, -1, 64))
            x = x + (taken * weights[..., None]).sum(1)
            decided.append(best)
        return self.leave(x), tuple(decided)


class Codes(nn.Module):
    """The nearest of 64 codes, learned with the straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decode = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.codes = nn.Parameter(torch.randn(64, 16) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Choice, Tensor, Tensor]:
        z = self.encode(x)
        apart = z.square().sum(-1, keepdim=True) - 2 * z @ self.codes.T + self.codes.square().sum(-1)
        nearest = apart.argmin(-1)
        code = self.codes[nearest]
        return self.decode(z + (code - z).detach()), (nearest[:, None],), z, code


class Sparse(nn.Module):
    """A sparse autoencoder: features pass where they lie above a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Choice]:
        features = self.encode(x)
        above = features > 0.5
        return self.decode(features * above), (above.reshape(-1, 1).int(),)


class Detector(nn.Module):
    """The 100 places of an image that are scored highest, with a box for each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        self.score, self.box = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 4, 1)

    def scores(self, x: Tensor) -> Tensor:
        return self.score(self.body(x)).flatten(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Choice]:
        seen = self.body(x)
        best, places = self.score(seen).flatten(1).topk(100, -1)
        boxes = self.box(seen).flatten(2).gather(2, places[:, None].expand(-1, 4, -1))
        return boxes * best.sigmoid()[:, None], (places,)


def text(rows: int, seed: int) -> Tensor:
    """Characters of a grammar: each follows from the two before it, or by chance."""
    draw = torch.Generator().manual_seed(seed)
    follows = torch.randint(0, 30, (30, 30, 3), generator=torch.Generator().manual_seed(0))
    ids = [torch.randint(0, 30, (rows,), generator=draw) for _ in range(2)]
    for _ in range(63):
        ids.append(follows[ids[-2], ids[-1], torch.randint(0, 3, (rows,), generator=draw)])
    return torch.stack(ids, 1)


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bright squares in noise, and where they are in the grid of half the size."""
    draw = torch.Generator().manual_seed(seed)
    x, there = 0.5 * torch.randn(count, 1, 64, 64, generator=draw), torch.zeros(count, 32, 32)
    for i, (row, column) in enumerate(torch.randint(0, 28, (count, 2), generator=draw).tolist()):
        x[i, 0, 2 * row : 2 * row + 8, 2 * column : 2 * column + 8] += 1
        there[i, row : row + 4, column : column + 4] = 1
    return x, there.flatten(1)


def fit(model: nn.Module, loss: Callable[[int], Tensor], steps: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    return model.eval()


def language() -> tuple[nn.Module, Tensor]:
    model = Language()

    def loss(step: int) -> Tensor:
        ids = text(64, step)
        return F.cross_entropy(model.logits(ids[:, :64]).flatten(0, 1), ids[:, 1:].flatten())

    return fit(model, loss, 100), text(64, 10**6)[:, :64]


def experts() -> tuple[nn.Module, Tensor]:
    model = Experts()
    wanted = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)

    def loss(step: int) -> Tensor:
        x = torch.randn(256, 16)
        return F.mse_loss(model(x)[0], 3 * wanted(x))

    return fit(model, loss, 200), torch.randn(16384, 16)


def codes() -> tuple[nn.Module, Tensor]:
    model, centres = Codes(), torch.randn(20, 32)

    def draw(count: int) -> Tensor:
        return centres[torch.randint(0, 20, (count,))] + 0.7 * torch.randn(count, 32)

    def loss(step: int) -> Tensor:
        x = draw(256)
        back, _, z, code = model(x)
        return F.mse_loss(back, x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())

    return fit(model, loss, 200), draw(32768)


def sparse() -> tuple[nn.Module, Tensor]:
    model, causes = Sparse(), torch.randn(64, 32) / 4

    def draw(count: int) -> Tensor:
        return torch.randn(count, 64).clamp(min=1) @ causes - causes.sum(0)

    def loss(step: int) -> Tensor:
        x = draw(256)
        return F.mse_loss(model(x)[0], x) + 1e-3 * model.encode(x).abs().mean()

    return fit(model, loss, 200), draw(512)


def detector() -> tuple[nn.Module, Tensor]:
    model = Detector()

    def loss(step: int) -> Tensor:
        x, there = images(16, step)
        return F.binary_cross_entropy_with_logits(model.scores(x), there)

    return fit(model, loss, 80), images(96, 10**6)[0]


MODELS = {
    "language model": language,
    "mixture of experts": experts,
    "vector quantizer": codes,
    "sparse autoencoder": sparse,
    "detector": detector,
}


@dataclass(frozen=True)
class Counted:
    """Flips of one operation that decides: predicted, seen in the audit's own run, and counted in torch's."""

    node: str
    decisions: int
    predicted: float
    seen: int
    counted: int


def count_flips(name: str) -> Iterator[Counted]:
    """Of every operation that decides; the decisions of the others are held as they were in FP32."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    found = next(one for one in measure_decisions(measurement_of(model, x), PLAIN) if one.format == "bf16").operations
    deciding = sorted((one for one in found if one.predicted is not None), key=lambda one: (len(one.node), one.node))
    with torch.no_grad():
        ours = model(x)[1]
        low, given = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x
        for i, (one, own) in enumerate(zip(deciding, ours, strict=True)):
            others = tuple(torch.empty(0) if i == j else chosen for j, chosen in enumerate(ours))
            theirs = (low(given, others) if len(ours) > 1 else low(given))[1][i]
            lost = sum(len(set(a) - set(b)) for a, b in zip(own.tolist(), theirs.tolist(), strict=True))
            yield Counted(one.node, own.numel(), one.count * one.predicted, round(one.count * one.own), lost)


def main() -> None:
    """Print a row for each operation that decides."""
    for name in MODELS:
        for one in count_flips(name):
            told = f"{one.decisions:,} | {one.predicted:.1f} | {one.seen} | {one.counted}"
            print(f"| {name} | {one.node} | {told} | {one.predicted / one.counted:.2f} |", flush=True)


if __name__ == "__main__":
    main()
