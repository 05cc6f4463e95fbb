"""Cases of rules beside the examples that they carry: where they end, what supersedes them, and what is like theirs but fine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.capturing import Function
from tests.support.replaying import Model


@dataclass(frozen=True)
class Case:
    """A toy model with every node that a rule must name on it, by code, and the rules that must name none.

    A rule that is in neither is not looked at here.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    fires: Mapping[str, set[str]]
    silent: tuple[str, ...]


def module(name: str, make: Callable[[], nn.Module], *inputs: Tensor, silent: str = "", **fires: str) -> Case:
    """fires: names of nodes by code; silent: codes."""
    return Case(name, make, inputs, {code: set(nodes.split()) for code, nodes in fires.items()}, tuple(silent.split()))


def case(name: str, function: Callable[..., Any], *inputs: Tensor, silent: str = "", **fires: str) -> Case:
    """The same of a function of its inputs."""
    return module(name, lambda: Function(function), *inputs, silent=silent, **fires)


def ramp(*shape: int, scale: float = 1.0) -> Tensor:
    """Evenly spaced numbers from -scale to scale: no randomness, no zeros for even counts."""
    return torch.linspace(-scale, scale, torch.Size(shape).numel()).reshape(shape)


def raised(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, where the author raises what it reads to FP32, and lowers what it gives."""

    def wide(*inputs: Tensor) -> Tensor:
        return function(*(x.float() if x.is_floating_point() else x for x in inputs)).to(inputs[0].dtype)

    return wide


def rms_norm(m: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight


def rms_norm_upcast_by_its_caller(m: Any, x: Tensor) -> Tensor:
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    return norm(x.float()).type_as(x) * m.weight


def layer_norm_centred_twice(x: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-5)


def batch_norm(variance: float) -> nn.Module:
    norm = nn.BatchNorm1d(8)
    norm.running_var.fill_(variance)
    return norm


def weighted(function: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: Model(function, weight=nn.Parameter(torch.ones(8)))


NORMS = (
    # 300 ** 2 = 90000 > 65504; the norm is named for what it is, not for its square alone
    module("rms norm, large", weighted(rms_norm), ramp(2, 8, scale=300), NRM001="pow_1", silent="NRM003"),
    case("energy", lambda x: x.square().sum(-1).log(), ramp(2, 8, scale=300), NRM003="square", silent="NRM001 RED006"),
    module(
        "rms norm, upcast by its caller",
        weighted(rms_norm_upcast_by_its_caller),
        ramp(2, 8, scale=300),
        silent="NRM001 NRM002 NRM003 NRM006",
    ),
    case(
        "a mean of squares",  # a statistic, but no normalization
        lambda x: x + torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        ramp(2, 8),
        silent="NRM001 NRM002 NRM003 NRM006",
    ),
    case("over channels", layer_norm_centred_twice, ramp(2, 8, 3, scale=1000), NRM002="pow_1", silent="NRM001 NRM003"),
    module("native", lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)), ramp(2, 8), silent="NRM001 NRM002 NRM003"),
    module("variance beyond FP16", lambda: batch_norm(65520.0), ramp(2, 8), NRM005="batch_norm"),
    module("largest variance", lambda: batch_norm(65504.0), ramp(2, 8), silent="NRM005"),
)


def unshifted(x: Tensor) -> Tensor:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def unshifted_guarded(x: Tensor) -> Tensor:
    e = torch.exp(x * 0.5)
    return e / (e.sum(-1, keepdim=True) + 1e-6)


SOFTMAX = (
    case("log softmax", lambda x: x.log_softmax(-1), ramp(2, 8), SFT001="log_softmax", silent="SFT005 SFT007"),
    # exp(20) = 4.9e8; halved, exp(10) = 22026 fits
    case("unshifted, large", unshifted, ramp(2, 8, scale=20), SFT002="exp", silent="SFT004 ACT001"),
    case("unshifted, guarded", unshifted_guarded, ramp(2, 8, scale=20), SFT002="exp", silent="SFT003 SFT004"),
    case("unshifted, upcast", raised(unshifted), ramp(2, 8, scale=20), silent="SFT002 SFT003 SFT004"),
    case("expm1", torch.expm1, ramp(2, 8, scale=12), SFT004="expm1"),  # expm1(12) = 162754
    case("log of sigmoid", lambda x: torch.log(x.sigmoid()[:, :4]), ramp(2, 8), SFT005="log"),
    case("long axis", lambda x: x.softmax(-1), ramp(1, 16385), SFT006="softmax"),
    case("longest safe axis", lambda x: x.softmax(-1), ramp(2, 16384), SFT001="softmax", silent="SFT006"),
)


class Tokens(nn.Module):
    """First and last layers by graph position, whatever they are called; a vocabulary of 16, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(16, 8), nn.Embedding(4, 8)
        self.norm, self.body, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.word.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.word(tokens) + self.position(torch.arange(4)))
        return self.head(self.body(x).relu())


def head_upcast(m: Any, x: Tensor) -> Tensor:
    return m.stem(x).mean((2, 3)).float() @ m.weight.float().t()


def head_protected(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x).mean((2, 3))
    with torch.autocast("cpu", enabled=False):
        return x.float() @ m.weight.float().t()


def with_head(function: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: Model(function, stem=nn.Conv2d(3, 4, 3), weight=nn.Parameter(ramp(4096, 4)))


def router_ignored(m: Any, x: Tensor) -> Tensor:
    """Its choice is computed, and every token goes the same way all the same."""
    m.gate(x.to(torch.float32)).topk(2)
    return m.out(x[:, :4])


BOUNDARY = (
    module("tokens", Tokens, torch.tensor([[1, 2, 3, 0]]), BND003="embedding embedding_1", silent="BND004"),
    module("head, upcast by hand", with_head(head_upcast), ramp(1, 3, 8, 8), BND005="matmul", silent="BND003 BND004"),
    module("head, protected", with_head(head_protected), ramp(1, 3, 8, 8), silent="BND004 BND005"),
    module(
        "router, ignored", lambda: Model(router_ignored, gate=nn.Linear(8, 4), out=nn.Linear(4, 2)), ramp(2, 8), silent="BND005 RTE001"
    ),
)  # fmt: skip

SQUARE = torch.eye(3) * 4 + ramp(3, 3)
SMALLER = {"size": (3, 3), "antialias": True}

LINALG = (
    case("inverse and determinant", lambda x: x.inverse() * x.det(), SQUARE, LIN001="det inverse"),
    case("cholesky", torch.linalg.cholesky, SQUARE @ SQUARE.T, LIN001="linalg_cholesky"),
    case("stft", lambda x: torch.stft(x, 4, return_complex=True).abs(), ramp(2, 16), LIN002="stft"),
    case("pdist", torch.pdist, ramp(3, 8), LIN003="pdist"),
    case("bicubic", lambda x: F.interpolate(x, mode="bicubic", **SMALLER), ramp(1, 1, 8, 8), LIN005="_upsample_bicubic2d_aa"),
    case("matrix exponential", torch.matrix_exp, SQUARE, LIN004="matrix_exp", silent="LIN001"),
)  # fmt: skip


def unrolled(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], 4)
    for step in x.unbind(1):
        h = m.cell(step, h)
    return h


def unrolled_lstm(m: Any, x: Tensor) -> Tensor:
    h, c = x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4)
    for step in x.unbind(1):
        h, c = m.cell(step, (h, c))
    return h


def steps_of(cell: Callable[[], nn.Module], function: Callable[..., Tensor] = unrolled) -> Callable[[], nn.Module]:
    return lambda: Model(function, cell=cell())


def calls(cell: str, count: int) -> str:
    return " ".join(cell if index == 0 else f"{cell}_{index}" for index in range(count))


RNN = "RNN001 RNN002 RNN003"

RECURRENT = (
    module("long gru", lambda: nn.GRU(3, 4, batch_first=True), ramp(1, 65, 3), RNN001="gru", silent="RNN002"),
    module("short gru, wide batch", lambda: nn.GRU(3, 4), ramp(64, 100, 3), silent=RNN),
    module("tanh rnn", lambda: nn.RNN(3, 4), ramp(8, 2, 3), silent=RNN),
    module(
        "relu cells",
        steps_of(lambda: nn.RNNCell(3, 4, nonlinearity="relu")),
        ramp(1, 2, 3),
        RNN002=calls("rnn_relu_cell", 2),
    ),
    module(
        "gru cells", steps_of(lambda: nn.GRUCell(3, 4)), ramp(1, 17, 3), RNN003=calls("gru_cell", 17), silent="RNN001"
    ),
    module("few gru cells", steps_of(lambda: nn.GRUCell(3, 4)), ramp(1, 16, 3), silent=RNN),
    module("lstm cells", steps_of(lambda: nn.LSTMCell(3, 4), unrolled_lstm), ramp(1, 20, 3), silent=RNN),
    # autocast lowers a recurrent layer whatever its input: the upcast is undone
    module(
        "gru, upcast",
        lambda: Model(lambda m, x: m.gru(x.float())[0], gru=nn.GRU(3, 4, batch_first=True)),
        ramp(1, 100, 3),
        BND005="gru",
        silent=RNN,
    ),
)


def nearest(x: Tensor, codes: Tensor) -> Tensor:
    return (x[:, None] - codes[None]).pow(2).sum(-1).argmin(-1) + x[:, 0]


ROUTING = (
    case("sorted", lambda x: x.sort(-1)[0], ramp(3, 4), RTE001="sort", silent="RTE002 RTE004"),
    case("nearest", nearest, ramp(3, 4), ramp(5, 4, scale=2), RTE002="argmin", silent="RTE003"),
    case("bucketize", lambda x: torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5])) + x, ramp(3, 4), RTE004="bucketize"),
    case(
        "a count", lambda x: x * (x > 0).to(torch.long).sum(-1, keepdim=True).to(x.dtype), ramp(3, 4), silent="RTE004"
    ),
)


def variance(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x * x).mean(-1, keepdim=True) - mean * mean


def degrees(x: Tensor, index: Tensor) -> Tensor:
    """A count, and a sum of messages in both directions: they cancel."""
    count = x.new_zeros(4).index_add(0, index, x.new_ones(index.shape[0]))
    sign = 1 - 2 * (torch.arange(index.shape[0]) // 4 % 2).to(x.dtype)
    return count.rsqrt() + x.new_zeros(4).index_add(0, index, sign * 0.3)


def degrees_in_fp32(x: Tensor, index: Tensor) -> Tensor:
    count = torch.zeros(4).index_add(0, index, torch.ones(index.shape[0]))
    return x * count.rsqrt().to(x.dtype)


def weighted_degrees(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_add(0, index, weight)


def stream(depth: int, step: float = 1e-3) -> Callable[[Tensor], Tensor]:
    """A residual stream of blocks without weights, each of which adds `step` of what tanh gives."""

    def forward(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = x + step * x.tanh()
        return x.exp()

    return forward


def decoder() -> nn.Module:
    """A GPT-2 of eight small layers: pre-norm, residual stream, weights as it draws them."""
    model = nn.Sequential(
        nn.Embedding(32, 16),
        *(nn.TransformerEncoderLayer(16, 2, 64, 0, "gelu", batch_first=True, norm_first=True) for _ in range(8)),
        nn.LayerNorm(16),
        nn.Linear(16, 32, bias=False),
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


LARGE = torch.full((2, 4), 1000.0)

REDUCTIONS = (
    case("pooled by a factor", lambda x: x.sum((1, 2), keepdim=True).squeeze() * (1 / 128), ramp(2, 16, 8), RED001="sum_1"),
    case("pooled few", lambda x: x.sum(1) / 64.0, ramp(2, 32, 4), silent="RED001"),
    # 64 * 2000 = 128000 > 65504
    case("pooled, large", lambda x: x.sum(1) / 64.0, torch.full((1, 64, 2), 2000.0), RED001="sum_1", silent="RED002"),
    case("large product", lambda x: x.prod(-1), torch.full((1, 4), 20.0), RED002="prod"),  # 20 ** 4 = 160000
    case("large total", lambda x: x.cumsum(-1), torch.full((1, 8), 9000.0), RED002="cumsum"),
    case("cumprod", lambda x: x.cumprod(0), ramp(300, 2), RED003="cumprod"),
    case("short cumsum", lambda x: x.cumsum(-1), ramp(300, 2), silent="RED003"),
    # the mean square is 10000, the variance 0.3 ** 2: 17 bits cancel
    case("small variance", variance, 100 + ramp(2, 8, scale=0.3), RED004="sub", silent="RED009"),
    case("variance, upcast", raised(variance), ramp(2, 8), silent="RED004"),
    case("long variance", lambda x: x.var(), ramp(2, 2049), RED007="var"),
    case("longest short mean", lambda x: x.mean(-1), ramp(2, 4096), silent="RED007"),
    # at 1 BF16 numbers are 1/128 apart: 12 updates of 0.76e-3 come to 1.2 spacings, each below half of one
    case("stream of 12", stream(12), ramp(2, 4), RED008="add_11"),
    case("stream of 11", stream(11), ramp(2, 4), silent="RED008"),
    case("stream of large updates", stream(16, 1.0), ramp(2, 4), silent="RED008"),
    module("a clean decoder", decoder, torch.arange(8)[None], silent="RED008"),
    case("opposite numbers", lambda x, y: x + y, LARGE, 2 - LARGE, RED009="add"),
    case("distant numbers", lambda x, y: x - y, LARGE, LARGE / 2, silent="RED009"),
)  # fmt: skip


def between_layers(function: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    """The function between two linear layers, which it may call `m.layer`."""
    return lambda: Model(lambda m, x: m.last(function(m, m.layer(x))), layer=nn.Linear(8, 8), last=nn.Linear(8, 8))


def filled(m: Any, x: Tensor) -> Tensor:
    result = torch.zeros(4, 8)
    result[torch.tensor([0, 1])] = x
    return result.to(x.dtype)


MIXED = (
    # what torch creates is FP32 beside a low-precision layer, whatever stands between; what raises is named
    module("mask made float", between_layers(lambda m, x: x * (x > 0).float()), ramp(2, 8), DTY002="linear_1"),
    module("mask in the dtype", between_layers(lambda m, x: x * (x > 0).to(x.dtype)), ramp(2, 8), silent="DTY002"),
    module("a scalar does not promote", between_layers(lambda m, x: x * torch.tensor(2.0)), ramp(2, 8), silent="DTY002"),
    module("upcast and back", between_layers(lambda m, x: x.float().exp().to(x.dtype)), ramp(2, 8), silent="DTY002"),
    module("filled", between_layers(filled), ramp(2, 8), DTY001="index_put", silent="DTY005"),
    module("norm", lambda: Model(lambda m, x: m.n(x.float()), n=nn.LayerNorm(8)), ramp(2, 8), DTY003="layer_norm"),
    module("norm as it is", lambda: Model(lambda m, x: m.n(x), n=nn.LayerNorm(8)), ramp(2, 8), silent="DTY003"),
    case(
        "mask of attention",
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(2, 2)),
        ramp(1, 2, 8),
        DTY004="scaled_dot_product_attention",
        silent="DTY005",
    ),
    case(
        "boolean mask",
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(2, 2, dtype=torch.bool)),
        ramp(1, 2, 8),
        silent="DTY004 DTY005",
    ),
    module("lerp", between_layers(lambda m, x: torch.lerp(x, -x, ramp(8))), ramp(2, 8), DTY005="lerp"),
    module("lerp by a number", between_layers(lambda m, x: torch.lerp(x, -x, 0.5)), ramp(2, 8), silent="DTY005"),
)  # fmt: skip


ONES = torch.ones(4)

COUNTS = (
    case("counts of 2500", degrees, ONES, torch.arange(10000) % 4, RED010="index_add", RED011="index_add"),
    # 600 of 2400 edges: at more than a quarter of 2048, a larger graph may reach it
    case("counts of 600", degrees, ONES, torch.arange(2400) % 4, RED010="index_add", RED011="index_add"),
    case("counts of 500", degrees, ONES, torch.arange(2000) % 4, RED011="index_add", silent="RED010"),
    case("counts of 25", degrees, ONES, torch.arange(100) % 4, silent="RED010 RED011"),
    case("few terms", degrees, ONES, torch.zeros(200, dtype=torch.long), silent="RED010 RED011"),
    case(
        "summed in FP32",
        lambda x, index: x.index_put((index,), x.new_ones(()), accumulate=True),
        ONES,
        torch.arange(4000) % 4,
        silent="RED010 RED011",
    ),
    case("counts in FP32", degrees_in_fp32, ONES, torch.arange(10000) % 4, silent="RED010 RED011"),
    case(
        "positive weights",
        weighted_degrees,
        ONES,
        torch.arange(4000) % 4,
        0.5 + torch.arange(4000) % 5 / 8,
        RED011="scatter_add",
        silent="RED010",
    ),
    case(
        "overwritten",
        lambda x, index: x.scatter(0, index, torch.ones_like(index).to(x.dtype)),
        ONES,
        torch.arange(4000) % 4,
        silent="RED010 RED011",
    ),
)

CASES = (*NORMS, *SOFTMAX, *BOUNDARY, *LINALG, *RECURRENT, *ROUTING, *REDUCTIONS, *COUNTS, *MIXED)
