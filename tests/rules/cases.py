"""Cases of rules beside the examples that they carry: norms, softmax, layers at the boundary, linear algebra, recurrence, choices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.case import Case, on, raised, ramp
from tests.support.capturing import Function


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class RmsNormUpcastByCaller(RmsNorm):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


def mean_of_squares(x: Tensor) -> Tensor:
    return x + torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  # a statistic, but no normalisation


def layer_norm_centred_twice(x: Tensor) -> Tensor:
    u = x.mean(1, keepdim=True)
    variance = (x - u).pow(2).mean(1, keepdim=True)
    return (x - u) / torch.sqrt(variance + 1e-5)


def batch_norm(variance: float) -> nn.Module:
    norm = nn.BatchNorm1d(8)
    norm.running_var.fill_(variance)
    return norm


NATIVE = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8))
BY_HAND = ("NRM001", "NRM002", "NRM003", "NRM006")

NORMS_CASES = (
    # 300 ** 2 = 90000 > 65504; the norm is named for what it is, not for its square alone
    Case("rms norm, large", RmsNorm, (ramp(2, 8, scale=300),), {"NRM001": {"pow_1"}}, ("NRM003",)),
    Case(
        "energy, large",
        *on(lambda x: x.square().sum(-1).log(), ramp(2, 8, scale=300)),
        {"NRM003": {"square"}},
        ("NRM001", "RED006"),
    ),
    Case("rms norm, upcast by its caller", RmsNormUpcastByCaller, (ramp(2, 8, scale=300),), {}, BY_HAND),
    Case("a mean of squares", *on(mean_of_squares, ramp(2, 8)), {}, BY_HAND),
    Case(
        "layer norm over channels, large",
        *on(layer_norm_centred_twice, ramp(2, 8, 3, scale=1000)),
        {"NRM002": {"pow_1"}},
        ("NRM001", "NRM003"),
    ),
    Case("native norms", lambda: NATIVE, (ramp(2, 8),), {"NRM004": {"layer_norm", "rms_norm"}}, ("NRM001", "NRM005")),
    Case("group norm", lambda: nn.GroupNorm(2, 8), (ramp(2, 8, 4),), {"NRM004": {"group_norm"}}),
    Case("variance beyond FP16", lambda: batch_norm(65520.0), (ramp(2, 8),), {"NRM005": {"batch_norm"}}),
    Case("largest variance", lambda: batch_norm(65504.0), (ramp(2, 8),), {}, ("NRM005",)),
)


# Softmax: native, by hand with and without the shift, over long axes; exponentials that leave FP16.


def unshifted(x: Tensor) -> Tensor:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def unshifted_guarded(x: Tensor) -> Tensor:
    e = torch.exp(x * 0.5)
    return e / (e.sum(-1, keepdim=True) + 1e-6)


def shifted(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


HAND = ("SFT002", "SFT003")

SOFTMAX_CASES = (
    Case(
        "log softmax", *on(lambda x: x.log_softmax(-1), ramp(2, 8)), {"SFT001": {"log_softmax"}}, ("SFT005", "SFT007")
    ),
    # exp(20) = 4.9e8; halved, exp(10) = 22026 fits
    Case("unshifted, large", *on(unshifted, ramp(2, 8, scale=20)), {"SFT002": {"exp"}}, ("SFT004", "ACT001")),
    Case("unshifted, guarded", *on(unshifted_guarded, ramp(2, 8, scale=20)), {"SFT002": {"exp"}}, ("SFT003", "SFT004")),
    Case("unshifted, upcast", *on(raised(unshifted), ramp(2, 8, scale=20)), {}, (*HAND, "SFT004")),
    Case("shifted, upcast", *on(raised(shifted), ramp(2, 8)), {}, HAND),
    Case("log softmax by hand, upcast", *on(raised(log_softmax), ramp(2, 8)), {}, ("SFT007",)),
    # expm1(12) = 162754
    Case("expm1", *on(torch.expm1, ramp(2, 8, scale=12)), {"SFT004": {"expm1"}}),
    Case("log of sigmoid", *on(lambda x: torch.log(x.sigmoid()[:, :4]), ramp(2, 8)), {"SFT005": {"log"}}),
    Case("long axis", *on(lambda x: x.softmax(-1), ramp(1, 16385)), {"SFT006": {"softmax"}}),
    Case("longest safe axis", *on(lambda x: x.softmax(-1), ramp(2, 16384)), {"SFT001": {"softmax"}}, ("SFT006",)),
)


# First and last layers by graph position, whatever they are called.


class Tokens(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, 8)
        self.position = nn.Embedding(4, 8)
        self.register_buffer("ids", torch.arange(4))
        self.norm = nn.LayerNorm(8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.word.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.word(tokens) + self.position(self.ids))
        return self.head(self.body(x).relu())


class HeadUpcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.weight = nn.Conv2d(3, 4, 3), nn.Parameter(ramp(4096, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x).mean((2, 3)).float() @ self.weight.float().t()


class HeadProtected(HeadUpcast):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean((2, 3))
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight.float().t()


class RouterUpcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x.to(torch.float32)).softmax(-1)
        return self.out(weights.to(x.dtype))


class RouterIgnored(RouterUpcast):
    """Its choice is computed, and every token goes the same way all the same."""

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x.to(torch.float32)).topk(2)
        return self.out(x[:, :4])


IDS = torch.tensor([[1, 2, 3, 0]])

BOUNDARY_CASES = (
    Case(
        "tokens, small vocabulary",
        lambda: Tokens(16),
        (IDS,),
        {"BND002": {"linear_1"}, "BND003": {"embedding", "embedding_1"}},
        ("BND001", "BND004"),
    ),
    Case(
        "head upcast by hand",
        HeadUpcast,
        (ramp(1, 3, 8, 8),),
        {"BND001": {"conv2d"}, "BND005": {"matmul"}},
        ("BND002", "BND003", "BND004"),
    ),
    Case("head protected", HeadProtected, (ramp(1, 3, 8, 8),), {}, ("BND002", "BND004", "BND005")),
    Case("router ignored", RouterIgnored, (ramp(2, 8),), {}, ("BND005", "RTE001")),
)


# Linear algebra, Fourier transforms and distances that have no half kernels.


IMAGE = ramp(1, 1, 8, 8)
SQUARE = torch.eye(3) * 4 + ramp(3, 3)


def inverse_and_determinant(x: Tensor) -> Tensor:
    return torch.inverse(x) * torch.linalg.det(x)


def spectrogram(x: Tensor) -> Tensor:
    return torch.stft(x, 4, window=torch.ones(4), return_complex=True).abs()


def resized(mode: str) -> Function:
    return Function(lambda x: F.interpolate(x, size=(3, 3), mode=mode, antialias=True))


LINALG_CASES = (
    Case("inverse and determinant", *on(inverse_and_determinant, SQUARE), {"LIN001": {"inverse", "linalg_det"}}),
    Case("cholesky", *on(torch.linalg.cholesky, SQUARE @ SQUARE.T), {"LIN001": {"linalg_cholesky"}}),
    Case("stft", *on(spectrogram, ramp(2, 16)), {"LIN002": {"stft"}}),
    Case("pdist", *on(torch.pdist, ramp(3, 8)), {"LIN003": {"pdist"}}),
    Case("resized, bicubic", lambda: resized("bicubic"), (IMAGE,), {"LIN005": {"_upsample_bicubic2d_aa"}}),
    Case("matrix exponential", *on(torch.matrix_exp, SQUARE), {"LIN004": {"matrix_exp"}}, ("LIN001",)),
)


# Recurrent layers and unrolled cells, short and long.


class Unrolled(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return h


class UnrolledLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return h


class GruUpcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.float())[0]


def calls(cell: str, count: int) -> set[str]:
    return {cell if index == 0 else f"{cell}_{index}" for index in range(count)}


ALL = ("RNN001", "RNN002", "RNN003", "RNN004")

RECURRENT_CASES = (
    Case(
        "long gru", lambda: nn.GRU(3, 4, batch_first=True), (ramp(1, 65, 3),), {"RNN001": {"gru"}}, ("RNN004", "RNN002")
    ),
    Case("short gru, wide batch", lambda: nn.GRU(3, 4), (ramp(64, 100, 3),), {"RNN004": {"gru"}}, ("RNN001",)),
    Case(
        "short lstm",
        lambda: nn.LSTM(3, 4, batch_first=True),
        (ramp(2, 8, 3),),
        {"RNN004": {"lstm"}},
        ("RNN001", "RNN002", "RNN003"),
    ),
    Case(
        "relu cells",
        lambda: Unrolled(nn.RNNCell(3, 4, nonlinearity="relu")),
        (ramp(1, 2, 3),),
        {"RNN002": calls("rnn_relu_cell", 2)},
    ),
    Case("tanh rnn", lambda: nn.RNN(3, 4), (ramp(8, 2, 3),), {"RNN004": {"rnn_tanh"}}, ("RNN002",)),
    Case(
        "gru cells",
        lambda: Unrolled(nn.GRUCell(3, 4)),
        (ramp(1, 17, 3),),
        {"RNN003": calls("gru_cell", 17)},
        ("RNN001",),
    ),
    Case("tanh cells", lambda: Unrolled(nn.RNNCell(3, 4)), (ramp(1, 20, 3),), {"RNN003": calls("rnn_tanh_cell", 20)}),
    Case("few gru cells", lambda: Unrolled(nn.GRUCell(3, 4)), (ramp(1, 16, 3),), {}, ALL),
    Case("lstm cells", UnrolledLstm, (ramp(1, 20, 3),), {}, ALL),
    # autocast lowers a recurrent layer whatever its input: the upcast is undone
    Case("gru, upcast", GruUpcast, (ramp(1, 100, 3),), {"BND005": {"gru"}}, ALL),
)


# Discrete choices: top-k, arg max, expanded distances, indices from arithmetic.


def expanded(x: Tensor, codes: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True) + (codes * codes).sum(-1)[None] - 2 * x @ codes.t()


def direct(x: Tensor, codes: Tensor) -> Tensor:
    return (x[:, None] - codes[None]).pow(2).sum(-1)


def mask_to_count(x: Tensor) -> Tensor:
    return x * (x > 0).to(torch.long).sum(-1, keepdim=True).to(x.dtype)


EDGES = torch.tensor([-0.5, 0.0, 0.5])
X = ramp(3, 4)
CODES = ramp(5, 4, scale=2)

ROUTING_CASES = (
    Case("sorted", *on(lambda x: x.sort(-1)[0], X), {"RTE001": {"sort"}}, ("RTE002", "RTE004")),
    Case("nearest", *on(lambda x, c: direct(x, c).argmin(-1) + x[:, 0], X, CODES), {"RTE002": {"argmin"}}, ("RTE003",)),
    Case("bucketize", *on(lambda x: torch.bucketize(x, EDGES) + x, X), {"RTE004": {"bucketize"}}),
    Case("a count", *on(mask_to_count, X), {}, ("RTE004",)),
)

CASES = (*NORMS_CASES, *SOFTMAX_CASES, *BOUNDARY_CASES, *LINALG_CASES, *RECURRENT_CASES, *ROUTING_CASES)
