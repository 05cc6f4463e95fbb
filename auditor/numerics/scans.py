"""Emulates CUDA's running sums and products, such as cumsum: every partial result is rounded to the entries' dtype.

For example, the running sum of 4096 ones in FP16 ends at 4096 on a CPU, which adds in float32, but at 2048 on CUDA. The
order of additions follows `scan_dim` in PyTorch's aten/src/ATen/native/cuda/ScanUtils.cuh. CUDA scans a single row with
the library cub, several rows along the last dimension in tiles (Sklansky's network), and any other dimension
sequentially. The tiles of cub have its default size for two-byte types; after the first tile, cub may use another order
of additions than this emulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .casting import in_float32, in_format, widen
from .entries import over_tensors, tensors_in
from .formats import Format
from .nodes import arguments_of, mutates, operation_of, overload_named, overload_of

_Combine = Callable[[Tensor, Tensor], Tensor]
_THREADS_LOG, _LEAST_LOG = 9, 4
"""log2 of the threads in a block, and of the fewest threads per row."""
_CUB_THREADS, _CUB_ITEMS, _WARP = 128, 30, 32
"""Threads of a cub block, entries per thread, and threads per warp."""


_COMBINES: dict[str, tuple[_Combine, float]] = {
    "sum": (torch.add, 0.0),
    "product": (torch.mul, 1.0),
    "log_sum": (
        lambda earlier, later: torch.logaddexp(earlier.float(), later.float()).to(earlier.dtype),
        float("-inf"),
    ),
}


def is_scan(target: Callable[..., Any]) -> bool:
    """Whether the operation, such as cumsum or cumsum_, returns all partial results along one dimension."""
    return bool(operation_of(target).scan) and (not mutates(overload_of(target)) or _is_in_place(target))


def _is_in_place(target: Callable[..., Any]) -> bool:
    return operation_of(target).name.endswith("_")


def run_scan(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """A running sum or product of half-precision tensors on a CPU, rounded like on CUDA; its gradient is torch's."""
    if _is_in_place(target):
        base = overload_named(f"aten.{operation_of(target).packet}.default")
        return args[0].copy_(run_scan(base, args, kwargs, row))
    x, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    asked = kwargs.get("dtype") or x.dtype
    if asked is not x.dtype or not isinstance(dim, int) or not x.dim() or not x.numel():
        return in_float32(target, args, kwargs, row) if asked is x.dtype else target(*args, **kwargs)
    values = _scan(x.detach(), dim % x.dim(), *_COMBINES[operation_of(target).scan])
    if not (torch.is_grad_enabled() and x.requires_grad):
        return values
    return _InPlaceOf.apply(in_float32(target, args, kwargs, row), values)  # type: ignore[no-untyped-call]


class _InPlaceOf(torch.autograd.Function):
    """Returns `values` in place of a result `computed` from the inputs; the gradient passes to `computed`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(computed: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save no tensor: the backward pass needs none."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].clone()


def _scan(x: Tensor, dim: int, combine: _Combine, neutral: float) -> Tensor:
    rows = x.movedim(dim, -1)
    if x.numel() == x.shape[dim]:
        return _by_cub(rows.reshape(-1), combine, neutral).reshape(x.shape)
    if dim < x.dim() - 1:
        result = _in_order(rows, combine)
    else:
        result = _in_tiles(rows.reshape(-1, x.shape[dim]), combine, neutral).reshape(rows.shape)
    return result.movedim(-1, dim).contiguous()


def _in_order(rows: Tensor, combine: _Combine) -> Tensor:
    """Sequential scan along the last dimension."""
    total, *rest = rows.unbind(-1)
    totals = [total]
    for entry in rest:
        total = combine(total, entry)
        totals.append(total)
    return torch.stack(totals, -1)


def _in_tiles(rows: Tensor, combine: _Combine, neutral: float) -> Tensor:
    """Sklansky's network, tile by tile; each tile's first entry includes the total so far. Shape: [rows, length]."""
    count, length = rows.shape
    # log2 of the threads per row: `get_log_num_threads_x_inner_scan`, whose unsigned difference wraps around
    wanted = _THREADS_LOG + (length - 1).bit_length() - (count - 1).bit_length()
    width = 2 << min(max((wanted % 2**32) // 2, _LEAST_LOG), _THREADS_LOG)
    tiles, total = [], None
    padded = torch.nn.functional.pad(rows, (0, -length % width), value=neutral)
    for tile in padded.reshape(count, -1, width).unbind(1):
        if total is not None:
            tile = torch.cat([combine(tile[:, :1], total), tile[:, 1:]], -1)
        half = 1
        while half < width:
            left, right = tile.reshape(count, -1, 2, half).unbind(2)
            tile = torch.stack([left, combine(right, left[..., -1:])], 2).reshape(count, width)
            half *= 2
        tiles.append(tile)
        total = tile[:, -1:]
    return torch.cat(tiles, -1)[:, :length]


def _by_cub(entries: Tensor, combine: _Combine, neutral: float) -> Tensor:
    """Scan in cub's order: each thread scans its entries, then adds the totals before it. Shape: [length]."""
    tile = _CUB_THREADS * _CUB_ITEMS
    padded = torch.nn.functional.pad(entries, (0, -len(entries) % tile), value=neutral)
    blocks = padded.reshape(-1, _CUB_THREADS, _CUB_ITEMS)
    threads = _in_order(blocks, combine)[..., -1].reshape(len(blocks), -1, _WARP)
    shift = 1
    while shift < _WARP:
        threads = torch.cat([threads[..., :shift], combine(threads[..., shift:], threads[..., :-shift])], -1)
        shift *= 2
    warps = _in_order(threads[..., -1], combine)
    start = torch.full_like(warps[:1, :1], neutral)
    tiles = torch.cat([start, _in_order(warps[None, :, -1], combine)[:, :-1]], 1)[0]
    before_warp = torch.cat([torch.full_like(warps[:, :1], neutral), warps[:, :-1]], 1)[..., None]
    before = torch.cat([torch.full_like(threads[..., :1], neutral), threads[..., :-1]], -1)
    prefix = combine(tiles[:, None, None], combine(before_warp, before)).reshape(len(blocks), -1, 1)
    return _in_order(torch.cat([prefix, blocks], -1), combine)[..., 1:].reshape(-1)[: len(entries)]


def fourier_transform(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format
) -> tuple[Any, list[int]]:
    """The Fourier transform in float32, rounded to the format; and the lengths of the transformed dimensions.

    cuFFT's rounding between passes is not emulated.
    """
    result = target(*widen(args), **widen(kwargs))
    return over_tensors(lambda x: _round(x, row), result), _lengths(target, args, kwargs, result)


def _round(x: torch.Tensor, row: Format) -> torch.Tensor:
    if not x.is_complex():
        return in_format(x, row)
    return torch.view_as_complex(in_format(torch.view_as_real(x.resolve_conj()), row))


def _lengths(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> list[int]:
    """Lengths of a Fourier transform's dimensions, from the result; for a half spectrum, from the real input."""
    given = arguments_of(target, args, kwargs, defaults=True)
    if "n_fft" in given:
        return [given["n_fft"]]
    x = tensors_in((args, kwargs))[0]
    sizes = _several(given.get("n", given.get("s")))
    dims = _several(given["dim"]) or list(range(-len(sizes), 0)) or list(range(x.dim()))
    lengths = [result.shape[d] for d in dims]
    if dims and result.is_complex() and not x.is_complex():
        lengths[-1] = sizes[-1] if sizes and sizes[-1] > 0 else x.shape[dims[-1]]
    return lengths


def _several(given: Any) -> list[int]:
    if given is None:
        return []
    return [given] if isinstance(given, int) else list(given)
