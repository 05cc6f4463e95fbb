"""Sixty planted bugs and sixty clean pairs, as changes of the source of six models and of their ports."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from auditor.features.compare.compare import Comparison, compare
from auditor.features.compare.record import record_run
from auditor.features.compare.recording import Recording, Value
from auditor.loading.subject import from_object

MODELS = Path(__file__).parent / "models"
NAMES = ("detection", "speech", "diffusion", "recurrent", "experts", "graph")
_numbers = itertools.count()


@dataclass(frozen=True)
class Change:
    """A change of a model's source. file: name of the file. old, new: the text that is replaced. base: parts of
    the lines of the original that the bug changes, if it is in a port or in a constructor; or the name of a buffer."""

    file: str
    old: str
    new: str
    base: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """The original's name."""
        return self.file.removesuffix("_port")


def bug(file: str, old: str, new: str, *base: str) -> Change:
    return Change(file, old, new, base)


BUGS = (
    # The same implementation with one bug.
    bug("detection", "eps=1e-3", "eps=1e-5", "x = self.norm(x)"),
    bug("detection", "return x + y", "return F.relu(x + y)"),
    bug("detection", "F.max_pool2d(two, 5, 1, 2)", "F.max_pool2d(one, 5, 1, 2)"),
    bug("detection", "torch.cat([x, one, two, three], 1)", "torch.cat([x, two, one, three], 1)"),
    bug("detection", "align_corners=False", "align_corners=True"),
    bug("detection", "torch.arange(height, device=x.device) + 0.5", "torch.arange(height, device=x.device) + 0.0"),
    bug("detection", "torch.stack([columns, rows], -1)", "torch.stack([rows, columns], -1)"),
    bug("detection", "low = middle - size / 2", "low = middle - size"),
    bug("detection", "self.scale[index]", "self.scale[0]"),
    bug("detection", "(images - 0.45) / 0.225", "(images - 0.45) / 0.226"),
    bug("speech", "periodic=True", "periodic=False", "window"),
    bug("speech", "0.97 * audio", "0.95 * audio"),
    bug("speech", "torch.log(mel + 1e-6)", "torch.log(mel + 1e-5)"),
    bug("speech", "mel.std(1, keepdim=True)", "mel.std(1, keepdim=True, unbiased=False)"),
    bug("speech", "(steps[None] - steps[:, None])", "(steps[:, None] - steps[None])"),
    bug("speech", "x = x * mask[..., None]\n", "x = x * 1.0\n"),
    bug("speech", "x + 0.5 * self.second(x)", "x + self.second(x)"),
    bug("speech", "scores / math.sqrt(q.shape[-1])", "scores / math.sqrt(x.shape[-1])"),
    bug("diffusion", "GroupNorm(4, width, eps=1e-6)", "GroupNorm(4, width)", "y = self.norm(x)"),
    bug("diffusion", "self.norm2(h) * (1 + scale) + shift", "self.norm2(h) * scale + shift"),
    bug("diffusion", "torch.cat([angles.cos(), angles.sin()], -1)", "torch.cat([angles.sin(), angles.cos()], -1)"),
    bug("diffusion", "torch.arange(half) / half", "torch.arange(half) / (half - 1)"),
    bug("diffusion", ".chunk(3, 1)\n", ".flip(1).chunk(3, 1)\n"),
    bug("diffusion", "(c // self.heads) ** -0.25", "c ** -0.25", "q * scale"),
    bug("diffusion", "clean.clamp(-3, 3)", "clean.clamp(-1, 1)"),
    bug("diffusion", "torch.cat([h, h1], 1)", "torch.cat([h, h0], 1)"),
    bug("recurrent", "self.gate(x) - 1.0", "self.gate(x) - 2.0"),
    bug("recurrent", "[last[-2], last[-1]]", "[last[-1], last[-2]]"),
    bug("recurrent", "F.softmax(scores, dim=1)", "F.softmax(scores, dim=0)"),
    bug("recurrent", "torch.cat([fed, context], -1), state", "torch.cat([fed, context], -1), torch.tanh(state)"),
    bug("experts", "eps=1e-6", "eps=1e-5", "square + self.eps"),
    bug("experts", "torch.cat([-right, left], -1)", "torch.cat([right, -left], -1)"),
    bug("experts", "k.repeat_interleave(self.heads // self.groups, 1)", "k.repeat(1, self.heads // self.groups, 1, 1)"),
    bug("experts", "30.0 * torch.tanh(scores / 30.0)", "50.0 * torch.tanh(scores / 50.0)"),
    bug("experts", "weights / weights.sum(-1, keepdim=True)", "weights"),
    bug("experts", "F.silu(self.w1(x)) * self.w3(x)", "F.silu(self.w3(x)) * self.w1(x)"),
    bug("experts", "torch.arange(0, self.size, 2) / self.size", "torch.arange(0, self.size, 2) / (2 * self.size)"),
    bug("experts", ".triu(1)", ".triu(2)"),
    bug("graph", "source = torch.cat([edges[0], loops])", "source = torch.cat([edges[0], loops.flip(0)])"),
    bug("graph", "inverse[source] * inverse[target]", "inverse[target] * inverse[target]"),
    bug("graph", "F.leaky_relu(joined, 0.2)", "F.leaky_relu(joined, 0.01)"),
    bug("graph", "mean = total / degree(graph, graphs).clamp(min=1)[:, None]", "mean = total"),
    # A port with one bug.
    bug("detection_port", "self.var + 1e-3", "self.var + 1e-4", "self.norm(x)"),
    bug(
        "detection_port", "F.max_pool2d(x, 9, stride=1, padding=4)", "F.max_pool2d(x, 7, stride=1, padding=3)", "two ="
    ),
    bug(
        "detection_port",
        "xs = torch.arange(w).repeat(h) * stride + stride / 2",
        "xs = torch.arange(w).repeat(h) * stride",
        "columns",
    ),
    bug(
        "detection_port",
        "half = 2.0 * torch.exp(extent.clamp(max=4.0))",
        "half = 2.0 * torch.exp(extent.clamp(max=4.0) * 1.01)",
        "size =",
    ),
    bug("speech_port", "variance + 1e-5", "variance + 1e-6", "self.norm(x)"),
    bug("speech_port", ".qkv(x).chunk(3, dim=-1)\n", ".qkv(x).roll(1, -1).chunk(3, dim=-1)\n", "q, k, v ="),
    bug("speech_port", "F.pad(audio, (1, 0))[:, :-1]", "F.pad(audio, (2, 0))[:, :-2]", "emphasized"),
    bug("speech_port", "y = value * gate.sigmoid()", "y = gate * value.sigmoid()", "F.glu"),
    bug("diffusion_port", "unbiased=False", "unbiased=True", "self.norm1(x)"),
    bug(
        "diffusion_port",
        "film[:, None, None, :half], film[:, None, None, half:]",
        "film[:, None, None, half:], film[:, None, None, :half]",
        "scale, shift =",
        "norm2(h)",
    ),
    bug(
        "diffusion_port",
        "reshape(n, h * w, self.heads, 3, c // self.heads)\n        q, k, v = qkv.permute(3, 0, 2, 1, 4)",
        "reshape(n, h * w, 3, self.heads, c // self.heads)\n        q, k, v = qkv.permute(2, 0, 3, 1, 4)",
        "q, k, v =",
        "einsum",
    ),
    bug("recurrent_port", "i, f, g, o = gates", "i, g, f, o = gates", "self.encoder(x)"),
    bug("recurrent_port", "n = torch.tanh(n_in + r * n_own)", "n = torch.tanh(r * (n_in + n_own))", "self.cell("),
    bug("recurrent_port", "return n + z * (h - n)", "return h + z * (n - h)", "self.cell("),
    bug(
        "experts_port",
        "share = torch.softmax(logits.masked_fill(~keep, -torch.inf), dim=-1)",
        "share = torch.softmax(logits, dim=-1) * keep",
        "weights = weights /",
    ),
    bug(
        "experts_port",
        "late = torch.arange(t)[None] > torch.arange(t)[:, None]",
        "late = torch.arange(t)[None] >= torch.arange(t)[:, None] + 2",
        ".triu(1)",
        "(scores + mask)",
    ),
    bug(
        "graph_port",
        "looped = adjacency + torch.eye(len(x))",
        "looped = adjacency + 2 * torch.eye(len(x))",
        "inverse",
        "loops",
        "degree",
        "torch.zeros(nodes)",
    ),
    bug(
        "graph_port",
        "shares = torch.softmax(logits, dim=1)",
        "shares = torch.softmax(logits, dim=0)",
        "powers",
        "shares",
        "largest",
        "total",
    ),
)

CLEAN = (
    # Ports as they are.
    *(Change(f"{name}_port", "", "") for name in NAMES),
    # The same function, written in another way.
    Change("detection", "return F.silu(x)", "return x * torch.sigmoid(x)"),
    Change("detection", "(images - 0.45) / 0.225", "images / 0.225 - 2.0"),
    Change(
        "detection",
        "joined = torch.cat([x, one, two, three], 1)\n        return self.pool(joined)",
        "parts = zip([x, one, two, three], self.pool.weight.chunk(4, 1))\n        return sum(F.conv2d(part, weight) for part, weight in parts) + self.pool.bias[:, None, None]",
    ),
    Change("detection", "logits.sigmoid()", "1 / (1 + torch.exp(-logits))"),
    Change(
        "detection",
        "middle = centers + shift\n        low = middle - size / 2\n        high = middle + size / 2",
        "low = centers - 0.5 * size + shift\n        high = low + size",
    ),
    Change(
        "detection", "best.topk(10)", "best.sort(1, descending=True)\n        top, places = top[:, :10], places[:, :10]"
    ),
    Change(
        "detection",
        "images = (images",
        "images = images.contiguous(memory_format=torch.channels_last)\n        images = (images",
    ),
    Change("speech", ".abs().square()", ".pow(2).abs()"),
    Change("speech", "torch.log(mel + 1e-6)", "torch.log10(mel + 1e-6) * math.log(10)"),
    Change(
        "speech",
        "scores = q @ k.transpose(-1, -2)\n        scores = scores / math.sqrt(q.shape[-1])",
        "scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)",
    ),
    Change("speech", 'float("-inf")', "-1e30"),
    Change("speech", "x = F.glu(x, -1)", "left, right = x.chunk(2, -1)\n        x = left * right.sigmoid()"),
    Change(
        "speech",
        "logits.log_softmax(-1) * mask[..., None]",
        "torch.where(mask[..., None], logits.softmax(-1).log(), 0.0)",
    ),
    Change("speech", "mel.std(1, keepdim=True)", "mel.var(1, keepdim=True).sqrt()"),
    Change(
        "speech",
        "for block in self.blocks:",
        "x = x.masked_fill(~mask[..., None], 7.0)\n        for block in self.blocks:",
    ),
    Change(
        "diffusion", "self.norm2(h) * (1 + scale) + shift", "torch.addcmul(self.norm2(h) + shift, self.norm2(h), scale)"
    ),
    Change(
        "diffusion", "torch.exp(-math.log(10000) * torch.arange(half) / half)", "10000 ** (-torch.arange(half) / half)"
    ),
    Change("diffusion", 'torch.einsum("bct,bcs->bts", q * scale, k * scale)', "((q * scale).mT @ (k * scale))"),
    Change(
        "diffusion",
        'F.interpolate(h, scale_factor=2, mode="nearest")',
        "h.repeat_interleave(2, 2).repeat_interleave(2, 3)",
    ),
    Change(
        "diffusion", "clean.clamp(-3, 3)", "torch.maximum(torch.minimum(clean, torch.tensor(3.0)), torch.tensor(-3.0))"
    ),
    Change("diffusion", "emb = emb + self.label(label)", "emb = emb + F.one_hot(label, 4).float() @ self.label.weight"),
    Change("diffusion", "return self.skip(x) + h", "return torch.stack([self.skip(x), h]).sum(0)"),
    Change(
        "diffusion",
        "h = self.conv1(F.silu(self.norm1(x)))",
        "h = F.silu(self.norm1(x.clone()))\n        h = torch.cat([self.conv1(one[None]) for one in h])",
    ),
    Change(
        "recurrent", "keep * torch.relu(self.change(x)) + (1 - keep) * x", "x + keep * (torch.relu(self.change(x)) - x)"
    ),
    Change("recurrent", "torch.cat([last[-2], last[-1]], -1)", "last[-2:].transpose(0, 1).flatten(1)"),
    Change(
        "recurrent", "(memory @ self.score(state)[..., None])[..., 0]", "(memory * self.score(state)[:, None]).sum(-1)"
    ),
    Change("recurrent", "scores.masked_fill(mask, -1e9)", "scores + torch.zeros(scores.shape).masked_fill(mask, -1e9)"),
    Change(
        "recurrent",
        "F.softmax(scores, dim=1)",
        "(scores - scores.amax(1, keepdim=True)).exp()\n        weights = weights / weights.sum(1, keepdim=True)",
    ),
    Change(
        "recurrent",
        "self.embed(tokens))",
        "F.embedding(tokens.flatten(), self.embed.weight, 0).view(*tokens.shape, -1))",
    ),
    Change(
        "recurrent",
        "state = self.cell(torch.cat([fed, context], -1), state)",
        "given = torch.cat([context, fed], -1)\n            weight = torch.cat([self.cell.weight_ih[:, 24:], self.cell.weight_ih[:, :24]], 1)\n            state = torch.gru_cell(given, state, weight, self.cell.weight_hh, self.cell.bias_ih, self.cell.bias_hh)",
    ),
    Change("recurrent", "torch.stack(tags, 1)", "torch.cat([one[:, None] for one in tags], 1)"),
    Change(
        "experts",
        "x.float().pow(2).mean(-1, keepdim=True)",
        "x.float().norm(dim=-1, keepdim=True).square() / x.shape[-1]",
    ),
    Change(
        "experts",
        "torch.rsqrt(square + self.eps)\n        return x * self.weight",
        "torch.rsqrt(square + self.eps) * self.weight\n        return x",
    ),
    Change("experts", "k.repeat_interleave(self.heads // self.groups, 1)", "k[:, [0, 0, 1, 1]]"),
    Change(
        "experts",
        "y = (weights @ v).transpose(1, 2).reshape(n, t, -1)\n        return self.o(y)",
        "y = weights @ v\n        return sum(F.linear(y[:, i], w) for i, w in enumerate(self.o.weight.chunk(self.heads, 1)))",
    ),
    Change(
        "experts",
        "probabilities = self.router(flat).softmax(-1)\n        weights, chosen = probabilities.topk(self.best, -1)\n        weights = weights / weights.sum(-1, keepdim=True)",
        "weights, chosen = self.router(flat).topk(self.best, -1)\n        weights = weights.softmax(-1)",
    ),
    Change(
        "experts",
        "self.w2(F.silu(self.w1(x)) * self.w3(x))",
        "F.linear(F.silu(self.w1(x)) * self.w3(x), self.w2.weight)",
    ),
    Change("experts", "angles = torch.cat([angles, angles], -1)", "angles = angles.repeat(1, 2)"),
    Change(
        "experts",
        'torch.full((t, t), float("-inf")).triu(1)',
        'torch.zeros(t, t).masked_fill(~torch.ones(t, t).tril().bool(), float("-inf"))',
    ),
    Change("graph", "degree(target, len(x)).pow(-0.5)", "1 / torch.bincount(target, minlength=len(x)).sqrt()"),
    Change(
        "graph",
        "source = torch.cat([edges[0], loops])\n        target = torch.cat([edges[1], loops])",
        "source = torch.cat([loops, edges[0]])\n        target = torch.cat([loops, edges[1]])",
    ),
    Change(
        "graph",
        "messages = self.linear(x)[source] * weight[:, None]\n        return torch.zeros_like(x).index_add(0, target, messages) + self.bias",
        "messages = x[source] * weight[:, None]\n        return self.linear(torch.zeros_like(x).index_add(0, target, messages)) + self.bias",
    ),
    Change("graph", "powers = (logits - largest[target]).exp()", "powers = logits.exp()"),
    Change("graph", ".norm(dim=-1)", ".square().sum(-1).sqrt()"),
    Change(
        "graph",
        "x = self.norm(x + h)\n        return x + self.weight * self.mlp(x)",
        "x = self.norm(h + x)\n        return x.addcmul(self.mlp(x), self.weight)",
    ),
    Change(
        "graph",
        "total = torch.zeros(graphs, h.shape[1]).index_add(0, graph, h)",
        "total = F.one_hot(graph, graphs).float().T @ h",
    ),
    Change(
        "graph",
        "self.head(torch.cat([mean, largest], -1))",
        "F.softplus(F.linear(torch.cat([mean, largest], -1), self.head[0].weight, self.head[0].bias))"
        " @ self.head[2].weight.T + self.head[2].bias",
    ),
    Change("graph", "shares = powers / (total[target] + 1e-16)", "shares = powers * (1 / total)[target]"),
    Change(
        "graph",
        "joined = h[source] + h[target] + self.edge(features)",
        "joined = self.linear(x[source] + x[target]) + self.edge(features)",
    ),
    Change(
        "diffusion",
        "noise = self.leave(F.silu(self.norm(h)))",
        "noise = self.leave(F.silu(self.norm(h.flatten(2)).view_as(h)))",
    ),
    Change(
        "diffusion",
        "clean = (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()",
        "clean = x * alpha.rsqrt() - (1 / alpha - 1).sqrt() * noise",
    ),
    Change(
        "experts",
        "x = x + self.attention(self.norm1(x), cos, sin, mask)",
        "y = torch.cat([self.norm1(one[None]) for one in x])\n        x = x + self.attention(y, cos, sin, mask)",
    ),
    Change(
        "detection",
        "c3 = self.stage3(self.stem(images))",
        "c3 = torch.cat([self.stage3(self.stem(one)) for one in images.split(1)])",
    ),
    Change(
        "speech",
        "hidden = F.silu(self.inner(self.norm(x)))\n        return self.out(hidden)",
        "order = torch.arange(self.inner.out_features).flip(0)\n        hidden = F.silu(F.linear(self.norm(x), self.inner.weight[order], self.inner.bias[order]))\n        return F.linear(hidden, self.out.weight[:, order], self.out.bias)",
    ),
)


def import_text(name: str, text: str, folder: Path) -> ModuleType:
    """Import a module from a text, by a name of its own."""
    own = f"{name}_{next(_numbers)}"
    file = folder / f"{own}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(own, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module
    spec.loader.exec_module(module)
    return module


def record(model: Any, given: tuple[Any, ...]) -> Recording:
    """A recording of one run."""
    return record_run(from_object(model, [given]))


@cache
def original(name: str) -> tuple[ModuleType, dict[str, Any], Recording]:
    """A model's module, its state and its recording."""
    sys.path.insert(0, str(MODELS))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(MODELS))
    model = module.build()
    return module, model.state_dict(), record(model, module.inputs())


def compared(change: Change, folder: Path) -> Comparison:
    """Compare the original with the changed model."""
    module, state, recording = original(change.model)
    text = (MODELS / f"{change.file}.py").read_text(encoding="utf-8")
    assert change.old in text, change
    changed = import_text(change.file, text.replace(change.old, change.new, 1), folder)
    model = (
        changed.build({key: x.clone() for key, x in state.items()}) if change.file != change.model else changed.build()
    )
    return compare(recording, record(model, module.inputs()))


def lines_of(change: Change) -> range:
    """Lines of the changed source."""
    text = (MODELS / f"{change.file}.py").read_text(encoding="utf-8")
    start = text[: text.index(change.old)].count("\n") + 1
    return range(start, start + change.new.rstrip("\n").count("\n") + 1)


def is_right(change: Change, found: Comparison) -> bool:
    """Whether the first place is the planted one: its source line in B, or the line of the original that does the same."""
    if not found.places:
        return False
    first = found.places[0]
    shown = [first.a, first.b, *found.read[0], *found.read[1]]
    return any(value is not None and _is_at(change, value) for value in shown)


def _is_at(change: Change, value: Value) -> bool:
    for place in (value.source, value.called_from and value.called_from.split(" in ")[0]):
        if place is None:
            continue
        file, line = place.rsplit(":", 1)
        if file.startswith(f"{change.file}") and int(line) in lines_of(change):
            return True
    return any(part in (value.code or "") or part == value.owner for part in change.base)
