"""Exceptions of the table in numpy's FP16, whose every operation rounds, as `Half op Half` does on CUDA."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from auditor.numerics.kernels import run_op

aten = torch.ops.aten
H, S = np.float16, np.float32


def half(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(H)


def run(target: Any, *args: Any, **kwargs: Any) -> np.ndarray:
    tensors = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in args]
    result = run_op(target, tuple(tensors), kwargs)
    return (result[0] if isinstance(result, tuple) else result).numpy()


G, X, Y = half(400), half(400, seed=1), half(400, seed=2)
PROBABILITIES, TARGETS = half(400, seed=3, low=0.01, high=0.99), half(400, seed=4, low=0.0, high=1.0)
N = H(1 / 400)


def smooth_l1(x: np.ndarray, y: np.ndarray, beta: np.float16) -> np.ndarray:
    z = np.abs(x - y)
    near = (S(0.5) * z.astype(S) * z.astype(S) / S(beta)).astype(H)
    far = (z.astype(S) - S(H(0.5) * beta)).astype(H)
    return np.where(z < beta, near, far)


def huber(x: np.ndarray, y: np.ndarray, delta: np.float16) -> np.ndarray:
    z = np.abs(x - y)
    near = (S(0.5) * z.astype(S) * z.astype(S)).astype(H)
    far = (S(delta) * (z.astype(S) - S(H(0.5) * delta))).astype(H)
    return np.where(z < delta, near, far)


def bce(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    ones, zeros = np.log(x.astype(S)).astype(H), np.log1p(-x.astype(S)).astype(H)
    return (t - H(1)) * zeros - t * ones


CASES: dict[str, tuple[Callable[[], np.ndarray], Callable[[], np.ndarray]]] = {
    "tanh_backward": (lambda: run(aten.tanh_backward.default, G, Y), lambda: G * (H(1) - Y * Y)),
    "sigmoid_backward": (lambda: run(aten.sigmoid_backward.default, G, Y), lambda: G * (H(1) - Y) * Y),
    "pow 3": (lambda: run(aten.pow.Tensor_Scalar, X, 3), lambda: X * X * X),
    "pow -2": (lambda: run(aten.pow.Tensor_Scalar, X, -2), lambda: H(1) / (X * X)),
    "div trunc": (
        lambda: run(aten.div.Tensor_mode, X, Y, rounding_mode="trunc"),
        lambda: np.trunc(X / Y),
    ),
    "round": (
        lambda: run(aten.round.decimals, X, decimals=2),
        lambda: np.rint(X * H(100)) / H(100),
    ),
    "mse": (lambda: run(aten.mse_loss.default, X, Y, 0), lambda: (X - Y) * (X - Y)),
    "mse backward": (
        lambda: run(aten.mse_loss_backward.default, G, X, Y, 1),
        lambda: H(2 / 400) * (X - Y) * G,
    ),
    "smooth_l1": (lambda: run(aten.smooth_l1_loss.default, X, Y, 0, 0.3), lambda: smooth_l1(X, Y, H(0.3))),
    "smooth_l1 backward": (
        lambda: run(aten.smooth_l1_loss_backward.default, G, X, Y, 1, 0.3),
        lambda: np.where(
            -H(0.3) > X - Y, -N * G, np.where(H(0.3) < X - Y, N * G, N * (X - Y) * G / H(0.3))
        ),
    ),
    "huber": (lambda: run(aten.huber_loss.default, X, Y, 0, 0.3), lambda: huber(X, Y, H(0.3))),
    "huber backward": (
        lambda: run(aten.huber_loss_backward.default, G, X, Y, 1, 0.3),
        lambda: np.where(
            -H(0.3) > X - Y, -N * G * H(0.3), np.where(H(0.3) < X - Y, N * G * H(0.3), N * (X - Y) * G)
        ),
    ),
    "bce": (
        lambda: run(aten.binary_cross_entropy.default, PROBABILITIES, TARGETS, None, 0),
        lambda: bce(PROBABILITIES, TARGETS),
    ),
    "bce backward": (
        lambda: run(aten.binary_cross_entropy_backward.default, G, PROBABILITIES, TARGETS, None, 0),
        lambda: G * (PROBABILITIES - TARGETS) / ((H(1) - PROBABILITIES) * PROBABILITIES),
    ),
    "softmax backward": (
        lambda: run(aten._softmax_backward_data.default, G.reshape(20, 20), Y.reshape(20, 20), -1, torch.float16),
        lambda: _softmax_backward(G.reshape(20, 20), Y.reshape(20, 20)),
    ),
    "addr": (
        lambda: run(aten.addr.default, X.reshape(20, 20), G[:20], Y[:20], beta=0.7, alpha=1.3),
        lambda: H(0.7) * X.reshape(20, 20) + (H(1.3) * G[:20])[:, None] * Y[:20],
    ),
    "cross": (
        lambda: run(aten.linalg_cross.default, X[:399].reshape(-1, 3), Y[:399].reshape(-1, 3)),
        lambda: np.stack(
            [
                X[:399].reshape(-1, 3)[:, (i + 1) % 3] * Y[:399].reshape(-1, 3)[:, (i + 2) % 3]
                - X[:399].reshape(-1, 3)[:, (i + 2) % 3] * Y[:399].reshape(-1, 3)[:, (i + 1) % 3]
                for i in range(3)
            ],
            -1,
        ),
    ),
    "prelu backward": (
        lambda: run_op(aten._prelu_kernel_backward.default, tuple(map(torch.from_numpy, (G, X, Y))), {})[1].numpy(),
        lambda: np.where(X > 0, H(0), X * G),
    ),
    "pad backward": (
        lambda: run(aten.reflection_pad1d_backward.default, half(1, 1, 12), half(1, 1, 8), [3, 1]),
        lambda: _reflected(half(12), 8, 3),
    ),
    "max pool backward": (
        lambda: run(
            aten.adaptive_max_pool2d_backward.default,
            half(1, 1, 3, 3), half(1, 1, 2, 2), torch.zeros(1, 1, 3, 3, dtype=torch.int64),
        ),
        lambda: _first(half(9), 4).reshape(1, 1, 2, 2),
    ),
    "unfold backward": (
        lambda: run(aten.unfold_backward.default, half(5, 4), [8], 0, 4, 1),
        lambda: _folded(half(5, 4), 8),
    ),
}  # fmt: skip


def _softmax_backward(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    product = (g * y).astype(S)
    return (product - y.astype(S) * product.sum(-1, keepdims=True)).astype(H)


def _reflected(grad: np.ndarray, size: int, left: int) -> np.ndarray:
    total = np.zeros(size, H)
    for place, g in enumerate(grad):
        at = abs(place - left)
        total[at if at < size else 2 * (size - 1) - at] += g
    return total.reshape(1, 1, size)


def _first(grad: np.ndarray, size: int) -> np.ndarray:
    total = np.zeros(size, H)
    for g in grad:
        total[0] += g
    return total


def _folded(windows: np.ndarray, size: int) -> np.ndarray:
    total = np.zeros(size, H)
    for start, window in enumerate(windows):
        for at, g in enumerate(window):
            total[start + at] += g
    return total


@pytest.mark.parametrize("name", CASES)
def test_an_exception_is_as_numpys_half_arithmetic(name: str) -> None:
    emulated, by_hand = CASES[name]
    with np.errstate(all="ignore"):
        found, expected = emulated(), by_hand()
    assert found.dtype == H
    np.testing.assert_array_equal(found, expected)


def test_bilinear_resizing_adds_its_gradients_in_the_format() -> None:
    """16 outputs over one pixel and its neighbours: weights in FP32, terms and sums in FP16."""
    grad = half(1, 1, 1, 6, seed=5)
    found = run(aten.upsample_bilinear2d_backward.default, grad, [1, 6], [1, 1, 1, 3], False)
    total = np.zeros(3, H)
    for second in (0, 1):
        for out, g in enumerate(grad.reshape(-1)):
            source = max(S(0), (S(out) + S(0.5)) * S(0.5) - S(0.5))
            first = int(source)
            share = S(source - first)
            at, weight = (min(first + 1, 2), share) if second else (first, S(1) - share)
            if weight:
                total[at] += H(weight * S(g))
    np.testing.assert_array_equal(found.reshape(-1), total)


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_grid_sampling_has_the_gradients_of_fp32_within_half_precision(padding: int, align: bool) -> None:
    """Every step is in the format: far less exact than FP32, and never far from it."""
    x, grid, grad = half(2, 3, 5, 6), half(2, 4, 3, 2, seed=1, low=-1.3, high=1.3), half(2, 3, 4, 3, seed=2)
    tensors = [torch.from_numpy(value) for value in (grad, x, grid)]
    for mode in (0, 1, 2):
        rest = (mode, padding, align, [True, True])
        found = run_op(aten.grid_sampler_2d_backward.default, (*tensors, *rest), {})
        exact = aten.grid_sampler_2d_backward.default(*(value.float() for value in tensors), *rest)
        for ours, theirs in zip(found, exact, strict=True):
            assert (ours.float() - theirs).norm() <= 0.02 * theirs.norm()
