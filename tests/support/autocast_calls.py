"""One valid call of the operations that CUDA autocast registers: arguments of `torch.ops.aten`, made by `t(*shape)`."""

from collections.abc import Callable
from typing import Any

import torch

Make = Callable[..., torch.Tensor]
Arguments = Callable[[Make], tuple[Any, ...]]


def index(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cuda")


def _pair(t: Make) -> tuple[Any, ...]:
    return t(2, 3), t(2, 3)


def _one(t: Make) -> tuple[Any, ...]:
    return (t(2, 3),)


def _cell(t: Make) -> tuple[Any, ...]:
    return t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)


LOWER: dict[str, Arguments] = {
    "_convolution": lambda t: (t(1, 2, 8), t(2, 2, 3), None, [1], [0], [1], False, [0], 1, False, False, True, True),
    "_convolution.deprecated": lambda t: LOWER["_convolution"](t)[:-1],
    "convolution": lambda t: (t(1, 2, 8), t(2, 2, 3), None, [1], [0], [1], False, [0], 1),
    **{f"conv{n}d": lambda t, n=n: (t(1, 2, *n * [8]), t(2, 2, *n * [3])) for n in (1, 2, 3)},
    **{
        f"conv{n}d.padding": lambda t, n=n: (t(1, 2, *n * [8]), t(2, 2, *n * [3]), None, [1], "same") for n in (1, 2, 3)
    },
    "conv_tbc": lambda t: (t(8, 1, 2), t(3, 2, 2), t(2)),
    "conv_transpose1d": lambda t: (t(1, 2, 8), t(2, 2, 3)),
    "conv_transpose2d.input": lambda t: (t(1, 2, 8, 8), t(2, 2, 3, 3)),
    "conv_transpose3d.input": lambda t: (t(1, 2, 8, 8, 8), t(2, 2, 3, 3, 3)),
    "prelu": lambda t: (t(2, 3), t(3)),
    "addmm": lambda t: (t(2, 2), t(2, 3), t(3, 2)),
    "addmv": lambda t: (t(2), t(2, 3), t(3)),
    "addr": lambda t: (t(2, 3), t(2), t(3)),
    "matmul": lambda t: (t(2, 3), t(3, 2)),
    "einsum": lambda t: ("ij,jk->ik", [t(2, 3), t(3, 2)]),
    "mm": lambda t: (t(2, 3), t(3, 2)),
    "mv": lambda t: (t(2, 3), t(3)),
    "linalg_vecdot": _pair,
    "linear": lambda t: (t(2, 3), t(4, 3), t(4)),
    "addbmm": lambda t: (t(2, 2), t(5, 2, 3), t(5, 3, 2)),
    "baddbmm": lambda t: (t(5, 2, 2), t(5, 2, 3), t(5, 3, 2)),
    "bmm": lambda t: (t(5, 2, 3), t(5, 3, 2)),
    "chain_matmul": lambda t: ([t(2, 3), t(3, 2)],),
    "linalg_multi_dot": lambda t: ([t(2, 3), t(3, 2)],),
    "lstm_cell": lambda t: (t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16)),
    "rnn_tanh_cell": _cell,
    "rnn_relu_cell": _cell,
    "scaled_dot_product_attention": lambda t: (t(1, 2, 5, 8), t(1, 2, 5, 8), t(1, 2, 5, 8)),
}

FP32: dict[str, Arguments] = {
    **dict.fromkeys(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus pdist nuclear_norm".split(),
        _one,
    ),
    "pow.Tensor_Scalar": lambda t: (t(2), 2.0),
    "pow.Tensor_Tensor": lambda t: (t(2), t(2)),
    "pow.Scalar": lambda t: (2.0, t(2)),
    "layer_norm": lambda t: (t(2, 3), [3], t(3), t(3)),
    "native_layer_norm": lambda t: (t(2, 3), [3], t(3), t(3), 1e-5),
    "rms_norm": lambda t: (t(2, 3), [3], t(3)),
    "group_norm": lambda t: (t(2, 4), 2, t(4), t(4)),
    "frobenius_norm.dim": lambda t: (t(2, 3), [1]),
    "nuclear_norm.dim": lambda t: (t(2, 3), [0, 1]),
    "cosine_similarity": _pair,
    "poisson_nll_loss": lambda t: (t(2), t(2), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda t: (t(2, 3), t(2, 3), t(2)),
    "nll_loss": lambda t: (t(2, 3), index(2)),
    "nll_loss2d": lambda t: (t(2, 3, 4, 4), index(2, 4, 4)),
    **dict.fromkeys(
        "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss soft_margin_loss".split(), _pair
    ),
    "margin_ranking_loss": lambda t: (t(2), t(2), t(2)),
    "multilabel_margin_loss": lambda t: (t(2, 3), index(2, 3)),
    "triplet_margin_loss": lambda t: (t(2, 3), t(2, 3), t(2, 3)),
    "multi_margin_loss": lambda t: (t(2, 3), index(2)),
    "binary_cross_entropy_with_logits": _pair,
    "dist": _pair,
    "cdist": lambda t: (t(2, 3), t(4, 3)),
    "renorm": lambda t: (t(2, 3), 2, 0, 1.0),
    "logsumexp": lambda t: (t(2, 3), [1]),
    **{
        f"{name}{n}d": lambda t, n=n: (t(1, 1, *n * [4]), n * [8])
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
    "upsample_linear1d": lambda t: (t(1, 1, 4), [8], False),
    "upsample_bilinear2d": lambda t: (t(1, 1, 4, 4), [8, 8], False),
    "_upsample_bilinear2d_aa": lambda t: (t(1, 1, 4, 4), [8, 8], False),
    "upsample_trilinear3d": lambda t: (t(1, 1, 4, 4, 4), [8, 8, 8], False),
    "upsample_bicubic2d": lambda t: (t(1, 1, 4, 4), [8, 8], False),
    "_upsample_bicubic2d_aa": lambda t: (t(1, 1, 4, 4), [8, 8], False),
    "norm.Scalar": _one,
    "norm.ScalarOpt_dim": lambda t: (t(2, 3), 2, [1]),
    "cross_entropy_loss": lambda t: (t(2, 3), index(2)),
    "nll_loss_nd": lambda t: (t(2, 3), index(2)),
    "linalg_norm": _one,
    "prod": _one,
    "prod.dim_int": lambda t: (t(2, 3), 1),
    "softmax.int": lambda t: (t(2, 3), 1),
    "log_softmax.int": lambda t: (t(2, 3), 1),
    "cumprod": lambda t: (t(2, 3), 1),
    "cumsum": lambda t: (t(2, 3), 1),
    "linalg_vector_norm": _one,
    "linalg_matrix_norm.str_ord": _one,
    "sum": _one,
    "sum.dim_IntList": lambda t: (t(2, 3), [1]),
}

PROMOTE: dict[str, Callable[[Make, Make], tuple[Any, ...]]] = {
    "addcdiv": lambda a, b: (a(2), b(2), b(2)),
    "addcmul": lambda a, b: (a(2), b(2), b(2)),
    "atan2": lambda a, b: (a(2), b(2)),
    "bilinear": lambda a, b: (a(2, 3), a(2, 4), b(5, 3, 4), b(5)),
    "cross": lambda a, b: (a(2, 3), b(2, 3)),
    "dot": lambda a, b: (a(3), b(3)),
    "vdot": lambda a, b: (a(3), b(3)),
    "tensordot": lambda a, b: (a(2, 3), b(3, 2), [1], [0]),
    "inner": lambda a, b: (a(2, 3), b(2, 3)),
    "index_put": lambda a, b: (a(3, 2), [index(2)], b(2, 2)),
    "scatter_add": lambda a, b: (a(2, 3), 0, index(2, 3), b(2, 3)),
}

NONE: dict[str, Arguments] = {
    **dict.fromkeys("relu sigmoid tanh gelu silu neg abs sqrt sin cos erf mean var std clone".split(), _one),
    **dict.fromkeys("add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum".split(), _pair),
    "amax": lambda t: (t(2, 3), [1]),
    "cat": lambda t: ([t(2, 3), t(2, 3)],),
    "max_pool2d": lambda t: (t(1, 1, 4, 4), [2, 2]),
    "avg_pool2d": lambda t: (t(1, 1, 4, 4), [2, 2]),
    "adaptive_avg_pool2d": lambda t: (t(1, 1, 4, 4), [1, 1]),
    "embedding": lambda t: (t(5, 3), index(2)),
    "_softmax": lambda t: (t(2, 3), 1, False),
    "masked_fill.Scalar": lambda t: (t(2, 3), index(2, 3).bool(), 0.0),
    "pixel_shuffle": lambda t: (t(1, 4, 2, 2), 2),
    "exp_": _one,
}
