"""CUDA kernels of elementwise operations, losses, reductions and products that round otherwise than once.

In the formulas r rounds to the format, and everything else is FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .cuda_exceptions import Given, Rounding, exception, rounded_number, rounder
from .scans import SCANS, scan

aten = torch.ops.aten

_MEAN, _SUM = 1, 2
"""ATen's codes for `reduction`; 0 is none."""


def _wide(x: Any) -> Any:
    """A tensor in float32; numbers and None are returned unchanged."""
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


# Elementwise backward kernels that compute in the format.


@exception("tanh_backward")
def _tanh_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """r(g * r(1 - r(y * y)))"""
    r, grad, y = rounder(dtype), given["grad_output"].float(), given["output"].float()
    slope = r(1 - r(y * y))
    return (grad * slope).to(dtype)


@exception("sigmoid_backward")
def _sigmoid_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """r(r(g * r(1 - y)) * y)"""
    r, grad, y = rounder(dtype), given["grad_output"].float(), given["output"].float()
    scaled = r(grad * r(1 - y))
    return (scaled * y).to(dtype)


@exception("log_sigmoid_backward")
def _log_sigmoid_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """Rounds once; computed from x alone, since CUDA's forward stores no buffer."""
    x = given["self"].float()
    return aten.log_sigmoid_backward(given["grad_output"].float(), x, torch.exp(-x.abs())).to(dtype)


@exception("softmax_backward")
def _softmax_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """t = r(g * y); r(t - y * sum t)"""
    r, y, dim = rounder(dtype), given["output"].float(), given["dim"]
    product = r(given["grad_output"].float() * y)
    return (product - y * product.sum(dim, keepdim=True)).to(dtype)


@exception("prelu_backward")
def _prelu_backward(given: Given, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The input's gradient, and the products whose sum, formed by torch, is the weight's gradient; both are
    rounded."""
    grad, x, weight = (given[name].float() for name in ("grad_output", "self", "weight"))
    zero = torch.zeros_like(grad)
    return torch.where(x > 0, grad, weight * grad).to(dtype), torch.where(x > 0, zero, x * grad).to(dtype)


# Powers, quotients and roundings.


@exception("pow")
def _pow(given: Given, dtype: torch.dtype) -> Tensor:
    """A number is rounded as exponent or base; x**3 = r(r(x * x) * x), x**-2 = r(1 / r(x * x))."""
    r = rounder(dtype)
    base = given["self"]
    exponent = given["exponent"]
    if isinstance(base, Tensor) and isinstance(exponent, Tensor):
        return torch.pow(_wide(base), _wide(exponent)).to(dtype)
    if isinstance(exponent, Tensor):
        if isinstance(base, complex):
            return torch.pow(base, exponent.float()).to(torch.complex32)
        return torch.pow(rounded_number(base, dtype), exponent.float()).to(dtype)
    x = base.float()
    if exponent in (0, 1, 0.5, -0.5, -1):
        return torch.pow(x, exponent).to(dtype)
    exponent = rounded_number(exponent, dtype)
    if exponent == 3:
        return (r(x * x) * x).to(dtype)
    if exponent == -2:
        return (1 / r(x * x)).to(dtype)
    return torch.pow(x, exponent).to(dtype)


@exception("div")
def _div(given: Given, dtype: torch.dtype) -> Tensor:
    """Divides by a number as a product with its FP32 inverse. rounding_mode "trunc": r(trunc(r(a / b))); "floor": see
    `_floored_quotient`."""
    x, y, mode = given["self"], given["other"], given.get("rounding_mode")
    if mode == "floor":
        return _floored_quotient(x, y, dtype)
    if not isinstance(y, Tensor):
        quotient = x.float() * _inverse(y)
        return (torch.trunc(quotient) if mode == "trunc" else quotient).to(dtype)
    quotient = _in_format(x, dtype) / _in_format(y, dtype)
    if mode == "trunc":
        quotient = torch.trunc(rounder(dtype)(quotient))
    return quotient.to(dtype)


@exception("floor_divide")
def _floor_divide(given: Given, dtype: torch.dtype) -> Tensor:
    return _floored_quotient(given["self"], given["other"], dtype)


def _inverse(number: Any) -> float:
    """1 / number in FP32."""
    return float(1 / torch.tensor(float(number), dtype=torch.float32))


def _in_format(x: Any, dtype: torch.dtype) -> Tensor:
    """An operand as the kernel loads it: converted to the format, then to FP32. Numbers become a tensor."""
    if not isinstance(x, Tensor):
        return torch.tensor(rounded_number(x, dtype))
    return x.to(dtype).float()


def _floored_quotient(x: Any, y: Any, dtype: torch.dtype) -> Tensor:
    """floor(x / y) by the remainder of the division, in FP32; the floor itself is rounded to the format.

    By a number, quotients are products with its FP32 inverse; by the number 0 the quotient itself is returned.
    """
    r = rounder(dtype)
    dividend = _in_format(x, dtype)
    if isinstance(y, Tensor):
        divisor = _in_format(y, dtype)
    elif y == 0:
        return (x.float() * _inverse(y)).to(dtype)
    else:
        divisor = torch.tensor(float(y), dtype=torch.float32)

    def divide(z: Tensor) -> Tensor:
        return z / divisor if isinstance(y, Tensor) else z * _inverse(y)

    remainder = torch.fmod(dividend, divisor)
    quotient = divide(dividend - remainder)
    signs_differ = (remainder != 0) & ((divisor < 0) != (remainder < 0))
    quotient = torch.where(signs_differ, quotient - 1, quotient)
    floor = r(torch.floor(quotient))
    floor = torch.where(quotient - floor > 0.5, r(floor + 1), floor)
    plain = divide(dividend)
    zero = torch.copysign(torch.zeros(()), plain)
    result = torch.where(quotient != 0, floor, zero)
    return torch.where(divisor == 0, plain, result).to(dtype)


@exception("round")
def _round(given: Given, dtype: torch.dtype) -> Tensor:
    """With `decimals`, rounds the power of ten, the product and the quotient to the format."""
    r, x, decimals = rounder(dtype), given["self"].float(), given.get("decimals", 0)
    if not decimals:
        return torch.round(x).to(dtype)
    power = rounded_number(10.0 ** abs(decimals), dtype)
    if decimals > 0:
        return (r(torch.round(r(x * power))) / power).to(dtype)
    return (r(torch.round(r(x / power))) * power).to(dtype)


@exception("softshrink")
def _softshrink(given: Given, dtype: torch.dtype) -> Tensor:
    """The threshold is rounded to the format; entries between -threshold and threshold become +0."""
    x = given["self"].float()
    limit = rounded_number(given["lambd"], dtype)
    shrunk = torch.zeros_like(x)
    shrunk = torch.where(x > limit, x - limit, shrunk)
    shrunk = torch.where(x < -limit, x + limit, shrunk)
    return torch.where(x.isnan(), x, shrunk).to(dtype)


@exception("nan_sign")
def _nan_sign(given: Given, dtype: torch.dtype) -> Tensor:
    """FP16: a NaN has no sign after its conversion to FP32."""
    name = "other" if "other" in given else "self"
    sign = _in_format(given[name], dtype)
    if dtype is torch.float16:
        sign = sign.masked_fill(sign.isnan(), math.nan).abs().where(sign.isnan(), sign)
    if name == "self":
        return torch.signbit(sign)
    return torch.copysign(_in_format(given["self"], dtype), sign).to(dtype)


# Losses. The mean or sum is a second kernel over the stored, rounded entries.


def _reduced(each: Tensor, reduction: int, dtype: torch.dtype) -> Tensor:
    stored = each.to(dtype)
    if reduction == _MEAN:
        return stored.float().mean().to(dtype)
    if reduction == _SUM:
        return stored.float().sum().to(dtype)
    return stored


def _share(given: Given, dtype: torch.dtype, times: float = 1.0) -> float:
    """The factor of a loss's gradient, `times` over the number of entries if the loss is a mean, rounded."""
    is_mean = given["reduction"] == _MEAN
    return rounded_number(times / given["self"].numel() if is_mean else times, dtype)


def _difference(given: Given, dtype: torch.dtype) -> Tensor:
    return rounder(dtype)(_in_format(given["self"], dtype) - _in_format(given["target"], dtype))


@exception("mse_loss")
def _mse_loss(given: Given, dtype: torch.dtype) -> Tensor:
    """d = r(a - b); r(d * d)"""
    difference = _difference(given, dtype)
    return _reduced(difference * difference, given["reduction"], dtype)


@exception("mse_loss_backward")
def _mse_loss_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """r(r(n * r(a - b)) * g) with n = r(2 / N)"""
    r, grad = rounder(dtype), given["grad_output"].float()
    return (r(_share(given, dtype, 2.0) * _difference(given, dtype)) * grad).to(dtype)


@exception("smooth_l1_loss")
def _smooth_l1_loss(given: Given, dtype: torch.dtype) -> Tensor:
    """z = abs(r(a - b)); below beta r(0.5 * z * z / beta), else r(z - r(0.5 * beta))"""
    beta, z = rounded_number(given["beta"], dtype), _difference(given, dtype).abs()
    far = z - rounded_number(0.5 * beta, dtype)
    each = torch.where(z < beta, 0.5 * z * z / beta, far) if beta else far
    return _reduced(each, given["reduction"], dtype)


@exception("smooth_l1_loss_backward")
def _smooth_l1_loss_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """x = r(a - b): n * g beyond beta, with the sign of x; else r(r(r(n * x) * g) / beta), n = r(1 / N)."""
    r = rounder(dtype)
    grad = given["grad_output"].float()
    n = _share(given, dtype)
    beta = rounded_number(given["beta"], dtype)
    x = _difference(given, dtype)
    near = torch.zeros_like(x)
    if beta:
        near = r(r(r(n * x) * grad) / beta)
    result = torch.where(x > beta, n * grad, near)
    result = torch.where(x < -beta, -n * grad, result)
    return result.to(dtype)


@exception("huber_loss")
def _huber_loss(given: Given, dtype: torch.dtype) -> Tensor:
    """z = abs(r(a - b)); below delta r(0.5 * z * z), else r(delta * (z - r(0.5 * delta)))"""
    delta, z = rounded_number(given["delta"], dtype), _difference(given, dtype).abs()
    far = delta * (z - rounded_number(0.5 * delta, dtype))
    return _reduced(torch.where(z < delta, 0.5 * z * z, far), given["reduction"], dtype)


@exception("huber_loss_backward")
def _huber_loss_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """x = r(a - b): r(r(n * g) * delta) beyond delta, with the sign of x; else r(r(n * x) * g), n = r(1 / N)."""
    r = rounder(dtype)
    grad = given["grad_output"].float()
    n = _share(given, dtype)
    delta = rounded_number(given["delta"], dtype)
    x = _difference(given, dtype)
    near = r(n * x) * grad
    far = r(n * grad) * delta
    result = torch.where(x > delta, far, near)
    result = torch.where(x < -delta, -far, result)
    return result.to(dtype)


@exception("binary_cross_entropy")
def _binary_cross_entropy(given: Given, dtype: torch.dtype) -> Tensor:
    """r(r(r(t - 1) * r(log1p(-x))) - r(t * r(log x))), logarithms at least -100; then times the weight."""
    if not given["target"].is_floating_point():
        raise TypeError(f"targets of {given['target'].dtype} are not supported: {dtype} is")
    r, x, target = rounder(dtype), given["self"].float(), given["target"].float()
    ones = torch.clamp(r(torch.log(x)), min=-100)
    zeros = torch.clamp(r(torch.log1p(-x)), min=-100)
    each = r(r(r(target - 1) * zeros) - r(target * ones))
    if given.get("weight") is not None:
        each = r(each * given["weight"].float())
    return _reduced(each, given["reduction"], dtype)


@exception("binary_cross_entropy_backward")
def _binary_cross_entropy_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """r(r(g * r(x - t)) / max(r(r(1 - x) * x), 1e-12)); in FP16, 1e-12 is 0."""
    r, x, target = rounder(dtype), given["self"].float(), given["target"].float()
    least = torch.tensor(rounded_number(1e-12, dtype))
    divisor = torch.maximum(r(r(1 - x) * x), least)
    grad = r(r(given["grad_output"].float() * r(x - target)) / divisor)
    if given.get("weight") is not None:
        grad = r(grad * given["weight"].float())
    if given["reduction"] == _MEAN:
        grad = grad * _inverse(x.numel())
    return grad.to(dtype)


def _picked(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """(values at the targets, weights of the targets, targets) of nll_loss; ignored targets have weight 0.

    Shapes: self [n, c, *] or [c], target [n, *] -> all [n, *].
    """
    x, target = given["self"].float(), given["target"]
    if target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"targets of {target.dtype} are not supported: int64 is")
    if x.dim() == 1:
        x, target = x.unsqueeze(0), target.reshape(1)
    ignored = target == given["ignore_index"]
    target = target.masked_fill(ignored, 0)
    values = x.gather(1, target.unsqueeze(1)).squeeze(1)
    weight = given.get("weight")
    weights = torch.ones_like(values) if weight is None else weight.float()[target]
    return values, weights.masked_fill(ignored, 0), target


@exception("nll_loss_forward")
def _nll_loss_forward(given: Given, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Products are rounded, sums are FP32; the sum of the weights, which the backward reads, is stored in the format."""
    r = rounder(dtype)
    values, weights, _ = _picked(given)
    if given["reduction"] == 0:
        losses = (-weights * values).to(dtype)
        if given["self"].dim() < 2:
            losses = losses.reshape(())
        return losses, torch.zeros((), dtype=dtype)
    total = r(values * weights).sum()
    weight = weights.sum()
    loss = -total
    if given["reduction"] == _MEAN:
        loss = loss / weight
    return loss.to(dtype), weight.to(dtype)


@exception("nll_loss2d_forward")
def _nll_loss2d_forward(given: Given, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks of an image sum in FP32; their sums are added in the format, and divided in the format."""
    r = rounder(dtype)
    values, weights, _ = _picked(given)
    if given["reduction"] == 0:
        return (-weights * values).to(dtype), torch.zeros((), dtype=dtype)
    loss, weight = torch.zeros(()), torch.zeros(())
    for product, weights_of_image in zip(r(values * weights).flatten(1), weights.flatten(1), strict=True):
        for block in _blocks(len(product)):
            loss = r(loss + r(-product[block].sum()))
            weight = r(weight + r(weights_of_image[block].sum()))
    if given["reduction"] == _MEAN:
        loss = loss / weight
    return loss.to(dtype), weight.to(dtype)


_BLOCK, _WAVES = 1024, 128
"""Threads of a block of nll_loss2d, and blocks' worth of pixels for each block."""


def _blocks(pixels: int) -> list[Tensor]:
    """The pixels that each block of an image sums up."""
    count = max(1, math.ceil(pixels / _BLOCK) // _WAVES)
    block_of = torch.arange(pixels) // _BLOCK % count
    return [(block_of == block).nonzero()[:, 0] for block in range(count)]


@exception("nll_loss_backward")
def _nll_loss_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """A mean divides by the sum of the weights as it was stored, in the format."""
    r, x = rounder(dtype), given["self"]
    _, weights, target = _picked(given)
    grad = given["grad_output"].float()
    if given["reduction"] == _MEAN:
        grad = r(grad / given["total_weight"].float())
    each = r(weights * -grad)
    flat = x.unsqueeze(0) if x.dim() == 1 else x
    result = torch.zeros(flat.shape).scatter(1, target.unsqueeze(1), each.expand(target.shape).unsqueeze(1))
    return result.reshape(x.shape).to(dtype)


@exception("multi_margin_loss")
def _multi_margin_loss(given: Given, dtype: torch.dtype) -> Tensor:
    """z = r(r(margin - x_t) + x_i) where positive; to the power p and weighted, rounded; a row's sum over the classes is
    rounded, and so is the sum over rows."""
    r = rounder(dtype)
    x = given["self"].float()
    target = given["target"].reshape(-1)
    rows = x if x.dim() == 2 else x.reshape(1, -1)  # [n, c]
    z, own = _margins(rows, target, rounded_number(given["margin"], dtype), r)
    terms = z if given["p"] == 1 else r(z * z)
    if given.get("weight") is not None:
        weights = given["weight"].float()[target]
        terms = r(terms * weights[:, None])
    sums = terms.masked_fill(own, 0).sum(1)
    losses = r(sums / _margin_divisor(rows, given["reduction"]))
    if given["reduction"] != 0:
        return losses.sum().to(dtype)
    if x.dim() < 2:
        losses = losses.reshape(())
    return losses.to(dtype)


def _margin_divisor(rows: Tensor, reduction: int) -> int:
    """What divides the sums over the classes: their number, times the number of rows for the mean over rows."""
    count = rows.shape[1]
    if reduction == _MEAN:
        count *= len(rows)
    return count


def _margins(rows: Tensor, target: Tensor, margin: float, r: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(positive margins, the mask of the targets), both [n, c]."""
    own = torch.zeros(rows.shape, dtype=torch.bool).scatter(1, target[:, None], True)
    at_target = rows.gather(1, target[:, None])
    z = r(r(margin - at_target) + rows)
    return z.clamp(min=0).masked_fill(own, 0), own


@exception("multi_margin_loss_backward")
def _multi_margin_loss_backward(given: Given, dtype: torch.dtype) -> Tensor:
    """The gradient of a target is the rounded negative sum of its row's rounded gradients."""
    r = rounder(dtype)
    x = given["self"].float()
    target = given["target"].reshape(-1)
    rows = x if x.dim() == 2 else x.reshape(1, -1)  # [n, c]
    z, own = _margins(rows, target, rounded_number(given["margin"], dtype), r)
    factor = 1 / _margin_divisor(rows, given["reduction"])
    slopes = (z > 0) * factor if given["p"] == 1 else 2 * factor * z
    if given.get("weight") is not None:
        weights = given["weight"].float()[target]
        slopes = slopes * weights[:, None]
    slopes = r(slopes)
    of_targets = r(-slopes.sum(1, keepdim=True))
    slopes = torch.where(own, of_targets, slopes)
    grad = given["grad_output"].float().reshape(-1, 1)
    return (slopes * grad).reshape(x.shape).to(dtype)


# Reductions, norms and scans.


def _scan_of(kind: str) -> Rounding:
    return lambda given, dtype: scan(given["self"].to(dtype), given["dim"], kind)


for _kind in SCANS:
    exception(f"scan_{_kind}")(_scan_of(_kind))


@exception("renorm")
def _renorm(given: Given, dtype: torch.dtype) -> Tensor:
    """FP32 norms; factors are rounded, and so are their products with the entries."""
    x, dim = given["self"].float(), given["dim"]
    others = [at for at in range(x.dim()) if at != dim % x.dim()]
    norm = torch.linalg.vector_norm(x, given["p"], others, keepdim=True)
    factor = rounder(dtype)(given["maxnorm"] / (norm + 1e-7))
    return torch.where(norm > given["maxnorm"], x * factor, x).to(dtype)


@exception("bincount")
def _bincount(given: Given, dtype: torch.dtype) -> Tensor:
    """Sums the weights in FP64."""
    weights = given["weights"].double()
    return torch.bincount(given["self"], weights, given["minlength"])


@exception("group_norm")
def _group_norm(given: Given, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rounds the result once, after eps was rounded; mean and rstd are stored in the format, and the backward reads
    them so."""
    weight, bias = _wide(given.get("weight")), _wide(given.get("bias"))
    shape = (given[name] for name in ("N", "C", "HxW", "group"))
    eps = rounded_number(given["eps"], dtype)
    results = aten.native_group_norm(given["input"].float(), weight, bias, *shape, eps)
    return tuple(x.to(dtype) for x in results)


@exception("linspace")
def _linspace(given: Given, dtype: torch.dtype) -> Tensor:
    """Start, end, step and every product are rounded; the second half counts from the end."""
    r, steps = rounder(dtype), given["steps"]
    start, end = (torch.tensor(rounded_number(given[name], dtype)) for name in ("start", "end"))
    if steps <= 1:
        return start.repeat(steps).to(dtype)
    step = r(r(end - start) / rounded_number(steps - 1, dtype))
    places = torch.arange(steps, dtype=torch.float32)
    rising = r(start + r(step * r(places)))
    falling = r(end - r(step * r(steps - 1 - places)))
    return torch.where(places < steps // 2, rising, falling).to(dtype)


# Products.


@exception("convolution")
def _convolution(given: Given, dtype: torch.dtype) -> Tensor:
    """The product is rounded before the bias is added; depthwise convolutions add it in FP32. A transposed convolution
    with stride 1 multiplies its padding, so that infinite weights give NaN."""
    x = _wide(given.get("input"))
    weight = _wide(given.get("weight"))
    bias = _wide(given.get("bias"))
    groups = given["groups"]
    is_transposed = given["transposed"]
    rest = [given[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
    is_depthwise = not is_transposed and groups > 1 and groups == x.shape[1]
    if bias is not None and is_depthwise:
        return aten.convolution(x, weight, bias, *rest).to(dtype)
    result = aten.convolution(x, weight, None, *rest)
    multiplies_padding = is_transposed and all(step == 1 for step in given["stride"])
    if multiplies_padding and not bool(weight.isfinite().all()):
        reached = aten.convolution(torch.ones_like(x), torch.ones_like(weight), None, *rest)
        taps = weight[0, 0].numel() * weight.shape[0] // groups
        reads_padding = reached < taps
        result = result.masked_fill(reads_padding, math.nan)
    if bias is None:
        return result.to(dtype)
    shape = [1, -1, *[1] * (result.dim() - 2)]
    rounded = rounder(dtype)(result)
    return (rounded + bias.reshape(shape)).to(dtype)


@exception("addmv")
def _addmv(given: Given, dtype: torch.dtype) -> Tensor:
    """Rounds the result once, after alpha and beta were rounded."""
    alpha, beta = (rounded_number(given[name], dtype) for name in ("alpha", "beta"))
    self, mat, vec = (given[name].float() for name in ("self", "mat", "vec"))
    return torch.addmv(self, mat, vec, alpha=alpha, beta=beta).to(dtype)


@exception("addr")
def _addr(given: Given, dtype: torch.dtype) -> Tensor:
    """r(r(beta * x) + r(r(alpha * v1) * v2)), alpha and beta rounded"""
    r = rounder(dtype)
    alpha, beta = (rounded_number(given[name], dtype) for name in ("alpha", "beta"))
    self, first, second = (_in_format(given[name], dtype) for name in ("self", "vec1", "vec2"))
    product = r(r(alpha * first)[:, None] * second)
    return (r(beta * self) + product if beta else product.clone()).to(dtype)


@exception("addbmm")
def _addbmm(given: Given, dtype: torch.dtype) -> Tensor:
    """Rounds the product of each matrix of the batch, and adds it in the format."""
    r, result, beta = rounder(dtype), given["self"].float(), float(given["beta"])
    for first, second in zip(given["batch1"].float(), given["batch2"].float(), strict=True):
        result = r(torch.addmm(result, first, second, beta=beta, alpha=float(given["alpha"])))
        beta = 1.0
    return result.to(dtype)


@exception("cross")
def _cross(given: Given, dtype: torch.dtype) -> Tensor:
    """r(r(a * b) - r(c * d)) for every component"""
    r = rounder(dtype)
    dim = given.get("dim")
    if dim is None:
        dim = -1
    x, y = torch.broadcast_tensors(given["self"].float(), given["other"].float())  # type: ignore[no-untyped-call]
    plus = r(x.roll(-1, dim) * y.roll(-2, dim))
    minus = r(x.roll(-2, dim) * y.roll(-1, dim))
    return (plus - minus).to(dtype)


# Casts to integers.


def saturated_integers(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a cast. Floating-point numbers beyond the range of int32 or int64 become its largest or smallest number, and
    NaN becomes 0 in int32 and the smallest number in int64. Source: PTX ISA, instruction `cvt`."""
    result = op(*args, **kwargs)
    source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
    if not isinstance(source, Tensor) or not source.is_floating_point():
        return result
    if not isinstance(result, Tensor) or result.dtype not in (torch.int32, torch.int64):
        return result
    limits, wide = torch.iinfo(result.dtype), source.double()
    saturated = torch.where(wide >= limits.max, limits.max, result)
    saturated = torch.where(wide <= limits.min, limits.min, saturated)
    saturated = torch.where(wide.isnan(), 0 if result.dtype is torch.int32 else limits.min, saturated)
    return result.copy_(saturated)
