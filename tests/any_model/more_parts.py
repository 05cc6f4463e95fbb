"""More parts: what Python decides, what is written, and what is kept."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.any_model.parts import PYTHON, STATE, WRITES, Holding, Part, kept, linear


class Doubled(torch.autograd.Function):
    """With a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Clipped(torch.autograd.Function):
    """Saves what it was given, and is no function of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        mask = x > low
        ctx.mark_non_differentiable(mask)
        return x.clamp(min=low), mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0].sign(), None


@torch.library.custom_op("drawn::waved", mutates_args=())
def waved(x: Tensor) -> Tensor:
    return x.sin()


@torch.library.custom_op("drawn::choosy", mutates_args=())
def choosy(x: Tensor, times: int) -> Tensor:
    if x.dtype is not torch.float32:
        raise ValueError(f"choosy knows no {x.dtype}")
    return x.cos() * times


@torch.library.custom_op("drawn::bump_", mutates_args=("x",))
def bump_(x: Tensor) -> None:
    x.add_(0.5)


# what Python decides


@kept(PYTHON)
def loops(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 4 == 0:
            for layer in m.layers:
                h = layer(h).tanh()
        elif k % 4 == 1:
            for index, row in enumerate(h.unbind(0)):
                h = torch.cat([h[:index], m.layers[0](row)[None], h[index + 1 :]])
        elif k % 4 == 2:
            steps = 0
            while h.abs().amax() > 0.5 and steps < 3:
                h, steps = h * 0.5, steps + 1
        else:
            h = torch.stack([m.layers[i % 2](row) for i, row in enumerate(h)])
        return h

    return Holding(run, layers=nn.ModuleList([linear(), linear()]))


@kept(PYTHON)
def branches(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 4 == 0:
            return m.one(h) if h.sum() > 0 else m.other(h)
        if k % 4 == 1:
            return m.one(h) if bool((h > 0).any()) and h.shape[0] > 1 else h
        if k % 4 == 2:
            return m.one(h) * h.mean().item()
        if float(h.detach().abs().max()) < 100:
            return m.one(h)
        return m.other(m.one(h))

    return Holding(run, one=linear(), other=linear())


@kept(PYTHON)
def experts(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        route, out = m.gate(h).argmax(-1), torch.zeros_like(h)
        for index, expert in enumerate(m.experts):
            rows = torch.where(route == index)[0]
            if k % 4 == 0:
                out[rows] = expert(h[rows])
            elif k % 4 == 1 and len(rows):
                out.index_add_(0, rows, expert(h[rows]))
            elif k % 4 == 2:
                out = out + expert(h) * (route == index)[:, None]
            else:
                out = out.index_copy(0, rows, expert(h[rows]).to(out.dtype))
        return out

    return Holding(run, gate=nn.Linear(8, 3), experts=nn.ModuleList([linear() for _ in range(3)]))


@kept(PYTHON)
def data_dependent(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        layer: Any = m.layer
        if k % 8 == 0:
            kept = h[h.abs().amax(-1) > 0.1]
            return h + layer(kept).sum(0)
        if k % 8 == 1:
            i, j = torch.nonzero(torch.cdist(h, h) < 4, as_tuple=True)
            return torch.zeros_like(h).index_add(0, i, layer(h[j]))
        if k % 8 == 2:
            return h + layer(torch.unique((h * 2).round(), dim=0)).mean(0)
        if k % 8 == 3:
            order = h.sum(-1).argsort()
            return layer(h[order])[order.argsort()]
        if k % 8 == 4:
            lengths = (h > 0).sum(-1).clamp_min(1).tolist()
            return torch.stack([layer(row[:n].mean().expand(8)) for row, n in zip(h, lengths, strict=True)])
        if k % 8 == 5:
            return h + h[h > 0].mean()
        if k % 8 == 6:
            first = int(h[0].argmax())
            return layer(h) + h[:, first : first + 1]
        return h + torch.bincount(h.argmax(-1), minlength=8).to(h.dtype) * layer(h)

    return Holding(run, layer=linear())


@kept(PYTHON)
def transforms(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 4 == 0:
            return torch.vmap(m.layer)(h)
        if k % 4 == 1:
            return torch.vmap(torch.func.grad(lambda row: m.layer(row).tanh().sum()))(h)
        if k % 4 == 2:
            return torch.vmap(lambda row: m.layer(row).softmax(-1))(h)
        weights = {name: p.detach() for name, p in m.layer.named_parameters()}
        return torch.func.functional_call(m.layer, weights, (h,))

    return Holding(run, layer=linear())


@kept(PYTHON)
def derivatives(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 4 == 0:
            with torch.enable_grad():
                x = h.detach().requires_grad_()
                return torch.autograd.grad(m.layer(x).tanh().sum(), x)[0]
        if k % 4 == 1:
            return Doubled.apply(m.layer(h))
        if k % 4 == 2:
            return Clipped.apply(m.layer(h), -0.5)[0]
        return checkpoint(m.layer, h, use_reentrant=False)

    return Holding(run, layer=linear())


@kept(PYTHON)
def operators(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        h = m.layer(h)
        if k % 4 == 0:
            return waved(h)
        if k % 4 == 1:
            return choosy(h.float(), 2)
        if k % 4 == 2:
            h = h.clone()
            bump_(h)
            return h
        if torch._C._functorch.is_batchedtensor(h):  # its rule for vmap wants branches as the compiler flattens them
            return h.sin()
        return torch.cond(h.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (h,))

    return Holding(run, layer=linear())


@kept(PYTHON)
def modes(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        around: Any = [torch.no_grad, torch.enable_grad, torch.inference_mode, contextlib.nullcontext][k % 4]
        with around():
            inside = m.layer(h).tanh()
        return m.layer(h) + inside.clone()

    return Holding(run, layer=linear())


@kept(PYTHON)
def regions(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 4 == 0:
            with torch.autocast("cuda", enabled=False):
                return m.layer(h.float()).float()
        if k % 4 == 1:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = m.layer(h)
            return inside.to(h.dtype)
        if k % 4 == 2:
            return m.layer(h.to(m.layer.weight.dtype)).to(h.dtype)
        with torch.autocast(device_type="cuda", dtype=torch.float16), torch.autocast("cuda", enabled=False):
            return m.layer(h.to(m.layer.weight.dtype))

    return Holding(run, layer=linear())


@kept(PYTHON)
def hooked(k: int) -> Part:
    layer = nn.Sequential(linear(), nn.Tanh())
    seen: list[Any] = []
    if k % 6 == 0:
        layer.register_forward_hook(lambda m, args, out: out * 2)
    elif k % 6 == 1:
        layer.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    elif k % 6 == 2:
        layer[0].register_forward_hook(lambda m, args, out: seen.append(out))
    elif k % 6 == 3:
        layer.register_forward_pre_hook(lambda m, args, kwargs: (args, kwargs), with_kwargs=True)
    elif k % 6 == 4:
        layer.register_forward_hook(lambda m, args, out: out.detach().clone(), always_call=True)
    else:
        layer[0].register_full_backward_hook(lambda m, given, got: None)
    return layer


# what is written


@kept(WRITES)
def in_place(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        h = m.layer(h)
        if k % 8 == 0:
            h[:, :4] = h[:, 4:].clone()
        elif k % 8 == 1:
            h.view(-1, 4).mul_(2)
        elif k % 8 == 2:
            h[0].zero_()
            h[:, 0] += 1
        elif k % 8 == 3:
            h.masked_fill_(h > 1, 1.0).relu_()
        elif k % 8 == 4:
            left, right = h.chunk(2, -1)
            left.add_(right)
        elif k % 8 == 5:
            h = torch.empty_like(h).copy_(h)
            h.T[1:3].sub_(1)
        elif k % 8 == 6:
            h[h > 0.5] = 0
        else:
            torch.add(h, 1, out=(h := torch.empty_like(h)))
        return h

    return Holding(run, layer=linear())


@kept(WRITES)
def in_place_modules(k: int) -> Part:
    return nn.Sequential(linear(), [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Dropout(0.5, inplace=True)][k % 3])


@kept(WRITES)
def buffers_written(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 4 == 0:
            m.seen += 1
            return h / m.seen
        if k % 4 == 1:
            m.mean.lerp_(h.detach().mean(0), 0.1)
            return h - m.mean
        if k % 4 == 2:
            m.mean = h.detach().mean(0)
            return h - m.mean
        m.alias.add_(h.detach().mean())
        return h + m.mean

    mean = torch.ones(8)
    return Holding(run, seen=torch.zeros(()), mean=mean, alias=mean[:4])


@kept(WRITES)
def input_written(k: int) -> Part:
    def run(h: Tensor) -> Tensor:
        if k % 3 == 0:
            h += 1
        elif k % 3 == 1:
            h[0] = 0
        else:
            h.clamp_(-1, 1)
        return h

    return run


# what is kept, and drawn


@kept(STATE)
def caches(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 4 == 0:
            if not hasattr(m, "table"):
                m.table = torch.linspace(0, 1, 8).cos()
            return h * m.table
        if k % 4 == 1:
            if h.dtype not in m.tables:
                m.tables[h.dtype] = torch.linspace(0, 1, 8).to(h.dtype)
            return h * m.tables[h.dtype]
        if k % 4 == 2:
            m.history.append(h.detach())
            return h + sum(m.history) / len(m.history)
        m.calls += 1
        return h * m.calls

    return Holding(run, tables={}, history=[], calls=0)


@kept(STATE)
def made_in_forward(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 3 == 0 and not hasattr(m, "scale"):
            m.scale = nn.Parameter(torch.full((8,), 0.5))
        elif k % 3 == 1 and not hasattr(m, "scale"):
            m.register_buffer("scale", torch.full((8,), 0.5))
        elif k % 3 == 2:
            m.scale = h.detach().abs().mean()
        return h * m.scale

    return Holding(run)


@kept(STATE)
def drawing(k: int) -> Part:
    def run(h: Tensor) -> Tensor:
        return [
            lambda: F.dropout(h, 0.5, training=True),
            lambda: h + torch.randn_like(h),
            lambda: h + torch.rand(8),
            lambda: h[torch.multinomial(h.softmax(-1), 1)[:, 0] % len(h)],
            lambda: h[torch.randperm(len(h))],
            lambda: F.gumbel_softmax(h, hard=bool(k > 5)),
            lambda: h * torch.bernoulli(torch.sigmoid(h)),
            lambda: torch.distributions.Normal(h, 1.0).rsample(),
        ][k]()

    return run
