"""Sixty models whose source has a problem of the kinds that public reports show, half of them projects of several files.

A problem is a helper between linear layers; `fixed` is the helper as a person writes it for low precision, "" if none is
known. In a project, the helper stands in a module of its own, in a package beside the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 64)
{init}
    def forward(self, {arguments}):
        h = torch.relu(self.a(x)){scale}
        h = {call}
        h = torch.relu(self.b(h))
        return self.c(h)


def get_model():
    torch.manual_seed(0)
    return Net().eval()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return ({inputs},)


def get_inputs():
    return [batch(1)]


def get_eval_inputs():
    return [batch(2)]
"""
HEAD = "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
X = "torch.randn(128, 64, generator=g)"


@dataclass(frozen=True)
class Problem:
    """A model with a problem. kind: dtypes, fp32 or algebra."""

    name: str
    kind: str
    helper: str
    call: str
    fixed: str = ""
    arguments: str = "x"
    inputs: str = X
    scale: str = ""
    init: str = ""
    project: bool = False

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats to audit: FP16 alone where the problem is its range, since BF16 would be the answer."""
        return ("fp16", "bf16") if self.kind == "dtypes" or self.name in IN_BOTH else ("fp16",)

    def write(self, folder: Path, *, fixed: bool = False) -> Path:
        """Write the model's files into a folder; returns the file to audit."""
        helper = (self.fixed if fixed else self.helper).strip() + "\n"
        init = "".join(f"        {line}\n" for line in self.init.splitlines())
        model = MODEL.format(init=init, arguments=self.arguments, scale=self.scale, call=self.call, inputs=self.inputs)
        if not self.project:
            file = folder / f"{self.name}.py"
            file.write_text(f"{HEAD}\n\n{helper}{model}")
            return file
        package = folder / f"{self.name}_net"
        (package / "layers").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "layers" / "__init__.py").write_text("from .ops import op\n")
        (package / "layers" / "ops.py").write_text(f"{HEAD}\n\n{helper}")
        (package / "model.py").write_text(f"{HEAD}\nfrom .layers import op\n\n{model}")
        file = folder / f"{self.name}.py"
        file.write_text(f"from {self.name}_net.model import get_eval_inputs, get_inputs, get_model\n")
        return file


def _op(body: str, arguments: str = "h") -> str:
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.strip().splitlines())
    return f"def op({arguments}):\n{lines}"


IN_BOTH = frozenset(
    {
        "counts",
        "long_counts",
        "phase",
        "running_sum",
        "differences",
        "variance_difference",
        "expansion",
        "fill",
        "where_fill",
    }
)
"""Problems outside of the kind `dtypes` that both formats have."""
MASK = f"{X}, torch.rand(128, generator=g) < 0.8"
INDEX = f"{X}, torch.randint(128, (128,), generator=g)"
HUBS = f"{X}, torch.arange(128) % 3, torch.randint(3, (12000,), generator=g)"
STEPS = f"{X}, torch.randint(1000, (128,), generator=g)"

SINGLE = (
    # dtypes
    Problem(
        "mask_float", "dtypes", _op("m = mask[:, None].float()\nreturn h * m", "h, mask"), "op(h, mask)",
        _op("m = mask[:, None].to(h.dtype)\nreturn h * m", "h, mask"), "x, mask", MASK,
    ),
    Problem(
        "zeros_written", "dtypes", _op("out = torch.zeros(128, 256)\nout[rows] = h\nreturn out", "h, rows"), "op(h, rows)",
        _op("out = torch.zeros(128, 256, dtype=h.dtype)\nout[rows] = h\nreturn out", "h, rows"), "x, rows",
        f"{X}, torch.arange(128)",
    ),
    Problem(
        "index_add_fp32", "dtypes",
        _op("total = torch.zeros(128, 256)\ntotal.index_add_(0, index, h)\nreturn total", "h, index"), "op(h, index)",
        _op("total = torch.zeros(128, 256, dtype=h.dtype)\ntotal.index_add_(0, index, h)\nreturn total", "h, index"),
        "x, index", INDEX,
    ),
    Problem(
        "lerp_share", "dtypes", _op("share = torch.linspace(0, 1, 256)\nreturn torch.lerp(h, -h, share)"), "op(h)",
        _op("share = torch.linspace(0, 1, 256, dtype=h.dtype)\nreturn torch.lerp(h, -h, share)"),
    ),
    Problem(
        "time_embedding", "dtypes",
        _op("freqs = torch.exp(-math.log(10000.0) * torch.arange(128) / 128)\n"
            "angle = step[:, None].float() * freqs\nemb = torch.cat([angle.cos(), angle.sin()], -1)\nreturn h + emb", "h, step"),
        "op(h, step)",
        _op("freqs = torch.exp(-math.log(10000.0) * torch.arange(128) / 128)\n"
            "angle = step[:, None].float() * freqs\nemb = torch.cat([angle.cos(), angle.sin()], -1)\nreturn h + emb.to(h.dtype)",
            "h, step"),
        "x, step", STEPS,
    ),
    Problem(
        "norm_upcast", "dtypes",
        _op("return F.layer_norm(h.float(), (256,))"), "op(h)", _op("return F.layer_norm(h.float(), (256,)).to(h.dtype)"),
    ),
    Problem(
        "one_hot_mix", "dtypes", _op("w = F.one_hot(step % 4, 4).float()\nreturn h * w.sum(-1, keepdim=True)", "h, step"),
        "op(h, step)", _op("w = F.one_hot(step % 4, 4).to(h.dtype)\nreturn h * w.sum(-1, keepdim=True)", "h, step"),
        "x, step", STEPS,
    ),
    Problem(
        "attention_mask", "dtypes",
        _op("q = h.view(1, 4, 128, 64)\nbias = torch.zeros(128, 128)\n"
            "return F.scaled_dot_product_attention(q, q, q, attn_mask=bias).reshape(128, 256)"),
        "op(h)",
        _op("q = h.view(1, 4, 128, 64)\nbias = torch.zeros(128, 128, dtype=h.dtype)\n"
            "return F.scaled_dot_product_attention(q, q, q, attn_mask=bias).reshape(128, 256)"),
    ),
    Problem(
        "plain_table", "dtypes", _op("return h * table + 1.0", "h, table"), "op(h, self.table)",
        _op("return h * table.to(h.dtype) + 1.0", "h, table"), init="self.table = torch.linspace(0.5, 1.5, 256)",
    ),
    Problem(
        "masked_scatter", "dtypes",
        _op("rows = mask[:, None].expand(128, 256)\nfill = torch.ones(128, 256) * 0.5\nreturn h.masked_scatter(rows, fill)", "h, mask"),
        "op(h, mask)",
        _op("rows = mask[:, None].expand(128, 256)\nfill = torch.ones(128, 256) * 0.5\n"
            "return h.masked_scatter(rows, fill.to(h.dtype))", "h, mask"),
        "x, mask", MASK,
    ),
    # FP32 from here on
    Problem(
        "rms_overflow", "fp32", _op("return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)"), "op(h)",
        _op("f = h.float()\nreturn (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)"), scale=" * 900",
    ),
    Problem(
        "counts", "fp32",
        _op("deg = h.new_zeros(128).index_add_(0, dst, h.new_ones(dst.shape[0]))\nnorm = deg.clamp(min=1).rsqrt()\n"
            "return h * norm[src][:, None] * 50", "h, src, dst"),
        "op(h, src, dst)",
        _op("deg = torch.zeros(128, device=h.device).index_add_(0, dst, torch.ones(dst.shape[0], device=h.device))\n"
            "norm = deg.clamp(min=1).rsqrt().to(h.dtype)\nreturn h * norm[src][:, None] * 50", "h, src, dst"),
        "x, src, dst", HUBS,
    ),
    Problem(
        "running_sum", "fp32", _op("total = (h + 5).cumsum(-1)\nreturn total[:, 16:] - total[:, :-16]"), "F.pad(op(h), (0, 16))",
        _op("total = (h + 5).float().cumsum(-1)\nreturn (total[:, 16:] - total[:, :-16]).to(h.dtype)"), scale=" * 2",
    ),
    Problem(
        "tiny_eps", "fp32", _op("s = h.pow(2).mean(-1, keepdim=True) * 1e-8\nreturn h * torch.rsqrt(s + 1e-8) * 1e-4"), "op(h)",
        _op("f = h.float()\ns = f.pow(2).mean(-1, keepdim=True) * 1e-8\nreturn (f * torch.rsqrt(s + 1e-8) * 1e-4).to(h.dtype)"),
    ),
    Problem(
        "variance_centered", "fp32", _op("mu = h.mean(-1, keepdim=True)\nd = h - mu\nvar = (d * d).mean(-1, keepdim=True)\n"
        "return d / torch.sqrt(var + 1e-5)"), "op(h)",
        _op("f = h.float()\nmu = f.mean(-1, keepdim=True)\nd = f - mu\nvar = (d * d).mean(-1, keepdim=True)\n"
            "return (d / torch.sqrt(var + 1e-5)).to(h.dtype)"), scale=" * 900",
    ),
    Problem(
        "gated", "fp32", _op("g = F.silu(h) * h\nreturn g * 1e-4"), "op(h)",
        _op("f = h.float()\ng = F.silu(f) * f\nreturn (g * 1e-4).to(h.dtype)"), scale=" * 300",
    ),
    Problem(
        "cosine", "fp32", _op("n = (h * h).sum(-1, keepdim=True).sqrt()\nreturn h / (n + 1e-8)"), "op(h)",
        _op("f = h.float()\nn = (f * f).sum(-1, keepdim=True).sqrt()\nreturn (f / (n + 1e-8)).to(h.dtype)"), scale=" * 400",
    ),
    Problem(
        "log_energy", "fp32", _op("power = (h + 1).square() * 10\nreturn torch.log(power + 1e-5)"), "op(h)",
        _op("power = (h + 1).float().square() * 10\nreturn torch.log(power + 1e-5).to(h.dtype)"), scale=" * 300",
    ),
    Problem(
        "phase", "fp32", _op("angle = step.to(h.dtype)[:, None] * freq.to(h.dtype)\nreturn h * angle.cos()", "h, step, freq"),
        "op(h, step, self.freq)",
        _op("angle = step.float()[:, None] * freq.float()\nreturn h * angle.cos().to(h.dtype)", "h, step, freq"),
        "x, step", STEPS, init='self.register_buffer("freq", 1.0 / 100 ** (torch.arange(256) / 256))',
    ),
    Problem(
        "expansion", "fp32",
        _op("d = h.pow(2).sum(1, keepdim=True) + h.pow(2).sum(1) - 2 * h @ h.t()\nw = torch.exp(-d.clamp(min=0) / 100)\n"
            "return w @ h / 128"), "op(h)",
        "", scale=" + 8",
    ),
    # algebra
    Problem(
        "log_sum_exp", "algebra", _op("z = h * 4\nreturn h - torch.log(torch.exp(z).sum(-1, keepdim=True)) / 16"), "op(h)",
        _op("z = h * 4\nreturn h - torch.logsumexp(z, -1, keepdim=True) / 16"), scale=" * 3",
    ),
    Problem(
        "log_softmax", "algebra", _op("p = F.softmax(h * 8, dim=-1)\nreturn torch.log(p) / 8"), "op(h)",
        _op("return F.log_softmax(h * 8, dim=-1) / 8"), scale=" * 3",
    ),
    Problem(
        "hand_softmax", "algebra", _op("e = torch.exp(h)\nreturn e / e.sum(-1, keepdim=True) * 64"), "op(h)",
        _op("return torch.softmax(h, -1) * 64"), scale=" * 12",
    ),
    Problem(
        "fill", "algebra", _op("s = h.masked_fill(mask[:, None], -1e9)\nreturn torch.relu(s)", "h, mask"), "op(h, mask)",
        _op("s = h.masked_fill(mask[:, None], torch.finfo(h.dtype).min)\nreturn torch.relu(s)", "h, mask"), "x, mask", MASK,
    ),
    Problem(
        "scores", "algebra", _op("s = h @ h.t() / 512\nreturn s.softmax(-1) @ h"), "op(h)",
        _op("s = (h / 512) @ h.t()\nreturn s.softmax(-1) @ h"), scale=" * 60",
    ),
    Problem(
        "pooled", "algebra", _op("return h - h.sum(-1, keepdim=True) / 256"), "op(h)",
        _op("return h - h.mean(-1, keepdim=True)"), scale=" * 1500",
    ),
    Problem(
        "softplus", "algebra", _op("return torch.log(1 + torch.exp(h))"), "op(h)", _op("return F.softplus(h)"), scale=" * 12",
    ),
    Problem(
        "variance_difference", "algebra",
        _op("v = (h ** 2).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2\nreturn h / torch.sqrt(v + 1e-2)"), "op(h)",
        _op("v = h.float().var(-1, keepdim=True, unbiased=False)\nreturn (h / torch.sqrt(v + 1e-2)).to(h.dtype)"), scale=" + 30",
    ),
    Problem(
        "log_product", "algebra", _op("p = torch.log(torch.prod(h[:, :8] + 6, -1, keepdim=True))\nreturn h * p / 8"), "op(h)",
        _op("p = torch.log(h[:, :8] + 6).sum(-1, keepdim=True)\nreturn h * p / 8"),
    ),
    Problem(
        "hand_norm", "algebra",
        _op("c = h - h.mean(-1, keepdim=True)\nreturn c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5)"), "op(h)",
        _op("return F.layer_norm(h, (256,))"), scale=" * 800",
    ),
)  # fmt: skip

IN_PROJECTS = (
    Problem(
        "pool_mask", "dtypes",
        _op("m = mask.unsqueeze(-1).expand(h.size()).float()\ntotal = torch.cumsum(h * m, -1)\n"
            "return total / torch.clamp(m.sum(-1, keepdim=True), min=1e-9)", "h, mask"), "op(h, mask)",
        "", "x, mask", MASK,
    ),
    Problem(
        "scatter_mean", "dtypes",
        _op("out = torch.zeros(128, 256).index_add(0, index, h)\nn = torch.zeros(128).index_add(0, index, torch.ones(128))\n"
            "return out / n.clamp(min=1)[:, None]", "h, index"), "op(h, index)",
        _op("out = torch.zeros(128, 256, dtype=h.dtype).index_add(0, index, h)\n"
            "n = torch.zeros(128).index_add(0, index, torch.ones(128)).to(h.dtype)\n"
            "return out / n.clamp(min=1)[:, None]", "h, index"), "x, index", INDEX,
    ),
    Problem(
        "fp32_bias", "dtypes", _op("bias = torch.arange(256, dtype=torch.float32) / 256\nreturn h + bias"), "op(h)",
        _op("bias = torch.arange(256, dtype=h.dtype) / 256\nreturn h + bias"),
    ),
    Problem(
        "cat_ones", "dtypes", _op("pad = torch.ones(128, 16)\nreturn torch.cat([h[:, :240], pad], -1)"), "op(h)",
        _op("pad = torch.ones(128, 16, dtype=h.dtype)\nreturn torch.cat([h[:, :240], pad], -1)"),
    ),
    Problem(
        "softmax_fp32", "dtypes", _op("w = torch.softmax(h.float(), -1)\nreturn w * h"), "op(h)",
        _op("w = torch.softmax(h.float(), -1).to(h.dtype)\nreturn w * h"),
    ),
    Problem(
        "global_scale", "dtypes", "SCALE = torch.linspace(0.5, 1.5, 256)\n\n\n" + _op("return h * SCALE"), "op(h)",
        "SCALE = torch.linspace(0.5, 1.5, 256)\n\n\n" + _op("return h * SCALE.to(h.dtype)"),
    ),
    Problem(
        "index_put", "dtypes",
        _op("canvas = torch.full((128, 256), 0.25)\ncanvas = canvas.index_copy(0, rows, h)\nreturn canvas", "h, rows"),
        "op(h, rows)",
        _op("canvas = torch.full((128, 256), 0.25, dtype=h.dtype)\ncanvas = canvas.index_copy(0, rows, h)\nreturn canvas",
            "h, rows"), "x, rows", f"{X}, torch.randperm(128, generator=g)",
    ),
    Problem(
        "numpy_inside", "dtypes",
        _op("top = h.detach().numpy().max()\nreturn h / float(top)"), "op(h)",
        _op("top = h.detach().float().numpy().max()\nreturn h / float(top)"),
    ),
    Problem(
        "einsum_fp32", "dtypes",
        _op("mix = torch.eye(256) * 0.5\nreturn torch.einsum('bi,ij->bj', h, mix)"), "op(h)",
        _op("mix = torch.eye(256, dtype=h.dtype) * 0.5\nreturn torch.einsum('bi,ij->bj', h, mix)"),
    ),
    Problem(
        "fourier_features", "dtypes",
        _op("t = torch.arange(256).float() / 256\nwave = torch.sin(6.28 * t)\nreturn h * wave"), "op(h)",
        _op("t = torch.arange(256).float() / 256\nwave = torch.sin(6.28 * t).to(h.dtype)\nreturn h * wave"),
    ),
    Problem(
        "rms_helper", "fp32",
        "def mean_square(h):\n    return h.square().mean(-1, keepdim=True)\n\n\n"
        + _op("scale = torch.rsqrt(mean_square(h) + 1e-6)\nreturn h * scale"), "op(h)",
        "def mean_square(h):\n    return h.float().square().mean(-1, keepdim=True)\n\n\n"
        + _op("scale = torch.rsqrt(mean_square(h) + 1e-6)\nreturn (h * scale).to(h.dtype)"), scale=" * 700",
    ),
    Problem(
        "long_counts", "fp32",
        "def histogram(h, bins):\n    ones = h.new_ones(bins.shape[0])\n    return h.new_zeros(4).scatter_add_(0, bins, ones)\n\n\n"
        + _op("n = histogram(h, bins)\nreturn h * n.rsqrt().sum() * 20", "h, bins"), "op(h, bins)",
        "def histogram(h, bins):\n    ones = torch.ones(bins.shape[0])\n    return torch.zeros(4).scatter_add_(0, bins, ones)\n\n\n"
        + _op("n = histogram(h, bins)\nreturn h * (n.rsqrt().sum() * 20).to(h.dtype)", "h, bins"),
        "x, bins", f"{X}, torch.randint(4, (20000,), generator=g)",
    ),
    Problem(
        "groups", "fp32",
        _op("g = h.view(128, 8, 32)\nmu = g.mean(-1, keepdim=True)\nvar = g.sub(mu).pow(2).mean(-1, keepdim=True)\n"
            "g = (g - mu) * torch.rsqrt(var + 1e-5)\nreturn g.view(128, 256)"), "op(h)",
        _op("g = h.float().view(128, 8, 32)\nmu = g.mean(-1, keepdim=True)\nvar = g.sub(mu).pow(2).mean(-1, keepdim=True)\n"
            "g = (g - mu) * torch.rsqrt(var + 1e-5)\nreturn g.view(128, 256).to(h.dtype)"), scale=" * 700",
    ),
    Problem(
        "small_variance", "fp32", _op("v = (h * 1e-4).pow(2).mean(-1, keepdim=True)\nreturn h * 1e-4 / torch.sqrt(v)"), "op(h)",
        _op("f = h.float()\nv = (f * 1e-4).pow(2).mean(-1, keepdim=True)\nreturn (f * 1e-4 / torch.sqrt(v)).to(h.dtype)"),
    ),
    Problem(
        "exp_scaled", "fp32", _op("y = torch.exp(h)\nreturn y * 1e-4"), "op(h)",
        _op("y = torch.exp(h.float())\nreturn (y * 1e-4).to(h.dtype)"), scale=" * 6",
    ),
    Problem(
        "power_ratio", "fp32", _op("p = h.pow(4)\nreturn p / (p.sum(-1, keepdim=True) + 1e-6) * 64"), "op(h)",
        _op("p = h.float().pow(4)\nreturn (p / (p.sum(-1, keepdim=True) + 1e-6) * 64).to(h.dtype)"), scale=" * 20",
    ),
    Problem(
        "standardize", "fp32", _op("return (h - h.mean(0)) / (h.var(0) + 1e-7).sqrt()"), "op(h)",
        _op("f = h.float()\nreturn ((f - f.mean(0)) / (f.var(0) + 1e-7).sqrt()).to(h.dtype)"), scale=" * 800",
    ),
    Problem(
        "differences", "fp32", _op("t = h + 4000\nreturn t[:, 1:] - t[:, :-1]"), "F.pad(op(h), (0, 1))",
        _op("t = h.float() + 4000\nreturn (t[:, 1:] - t[:, :-1]).to(h.dtype)"), scale=" * 4",
    ),
    Problem(
        "geometric", "fp32", _op("p = torch.prod(h[:, :8] + 6, -1, keepdim=True)\nreturn h * p ** 0.125"), "op(h)",
        _op("p = torch.prod((h[:, :8] + 6).float(), -1, keepdim=True)\nreturn h * (p ** 0.125).to(h.dtype)"),
    ),
    Problem(
        "long_sum", "fp32", _op("s = h.sum()\nreturn h / s * 1000"), "op(h)",
        _op("s = h.float().sum()\nreturn (h.float() / s * 1000).to(h.dtype)"), scale=" * 40",
    ),
    Problem(
        "energy", "algebra", _op("energy = (h * 3).exp().sum(dim=-1, keepdim=True).log()\nreturn h - energy / 8"), "op(h)",
        _op("energy = torch.logsumexp(h * 3, -1, keepdim=True)\nreturn h - energy / 8"), scale=" * 4",
    ),
    Problem(
        "nll", "algebra", _op("return h.mul(6).softmax(dim=-1).log() / 6"), "op(h)",
        _op("return h.mul(6).log_softmax(dim=-1) / 6"), scale=" * 4",
    ),
    Problem(
        "attention_helper", "algebra",
        "def weights(q, k):\n    return torch.matmul(q, k.transpose(-2, -1)) * 0.002\n\n\n"
        + _op("return weights(h, h).softmax(-1) @ h"), "op(h)",
        "def weights(q, k):\n    return torch.matmul(q * 0.002, k.transpose(-2, -1))\n\n\n"
        + _op("return weights(h, h).softmax(-1) @ h"), scale=" * 60",
    ),
    Problem(
        "where_fill", "algebra", _op("s = torch.where(mask[:, None], h, -1e9)\nreturn torch.softmax(s, -1) * 64", "h, mask"),
        "op(h, mask)",
        _op("s = torch.where(mask[:, None], h, torch.finfo(h.dtype).min)\nreturn torch.softmax(s, -1) * 64", "h, mask"), "x, mask", MASK,
    ),
    Problem(
        "additive_mask", "algebra",
        _op("s = h + (1.0 - mask[:, None].to(h.dtype)) * -1e9\nreturn torch.softmax(s, -1) * 64", "h, mask"), "op(h, mask)",
        _op("s = h + (1.0 - mask[:, None].to(h.dtype)) * (torch.finfo(h.dtype).min / 2)\nreturn torch.softmax(s, -1) * 64", "h, mask"),
        "x, mask", MASK,
    ),
    Problem(
        "mean_by_hand", "algebra", _op("n = h.shape[-1]\nreturn h - h.sum(dim=-1, keepdim=True).div(n)"), "op(h)",
        _op("return h - h.mean(dim=-1, keepdim=True)"), scale=" * 1500",
    ),
    Problem(
        "shifted_softmax", "algebra",
        _op("z = h - h.amax(-1, keepdim=True)\ne = torch.exp(z)\nreturn torch.log(e / e.sum(-1, keepdim=True)) / 8"), "op(h)",
        _op("return torch.log_softmax(h, -1) / 8"), scale=" * 20",
    ),
    Problem(
        "lengths", "algebra", _op("n = torch.sqrt((h ** 2).sum(-1, keepdim=True))\nreturn h / n"), "op(h)",
        _op("n = torch.linalg.vector_norm(h, dim=-1, keepdim=True)\nreturn h / n"), scale=" * 500",
    ),
    Problem(
        "log_add", "algebra", _op("return torch.log(torch.exp(h) + torch.exp(h.flip(-1)))"), "op(h)",
        _op("return torch.logaddexp(h, h.flip(-1))"), scale=" * 12",
    ),
    Problem(
        "log_sigmoid", "algebra", _op("return torch.log(torch.sigmoid(-h * 3))"), "op(h)",
        _op("return F.logsigmoid(-h * 3)"), scale=" * 8",
    ),
)  # fmt: skip

PROBLEMS = (*SINGLE, *(Problem(**{**vars(one), "project": True}) for one in IN_PROJECTS))
assert len(PROBLEMS) == 60
