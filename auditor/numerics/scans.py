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

from .entries import tensors_in
from .nodes import arguments_of

_Combine = Callable[[Tensor, Tensor], Tensor]
_THREADS_LOG, _LEAST_LOG = 9, 4
"""log2 of the threads in a block, and of the fewest threads per row."""
_CUB_THREADS, _CUB_ITEMS, _WARP = 128, 30, 32
"""Threads of a cub block, entries per thread, and threads per warp."""

SCANS: dict[str, tuple[_Combine, float]] = {
    "sum": (torch.add, 0.0),
    "product": (torch.mul, 1.0),
    "log_sum": (torch.logaddexp, float("-inf")),
}
"""{kind of scan: how float32 numbers combine, and the neutral number}."""


def scan(x: Tensor, dim: int, kind: str) -> Tensor:
    """All partial results of a FP16 or BF16 tensor along one dimension, each rounded as on CUDA. Shapes: [*] -> [*]."""
    if not x.dim() or not x.numel():
        return x.clone()
    exact, neutral = SCANS[kind]
    dtype, dim = x.dtype, dim % x.dim()

    def combine(earlier: Tensor, later: Tensor) -> Tensor:
        return exact(earlier, later).to(dtype).float()

    wide = x.float()
    rows = wide.movedim(dim, -1)
    if x.numel() == x.shape[dim]:
        result = _by_cub(rows.reshape(-1), combine, neutral).reshape(x.shape)
    elif dim < x.dim() - 1:
        result = _in_order(rows, combine).movedim(-1, dim)
    else:
        result = _in_tiles(rows.reshape(-1, x.shape[dim]), combine, neutral).reshape(x.shape)
    return result.to(dtype).contiguous()


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
    blocks = padded.reshape(-1, _CUB_THREADS, _CUB_ITEMS)  # [tiles, threads, items]
    totals = _in_order(blocks, combine)[..., -1]  # [tiles, threads]

    # Totals up to and including each thread in its warp, each warp in its tile, and each tile.
    threads = _by_warp(totals.reshape(len(blocks), -1, _WARP), combine)  # [tiles, warps, lanes]
    warps = _in_order(threads[..., -1], combine)  # [tiles, warps]
    tiles = _in_order(warps[None, :, -1], combine)  # [1, tiles]

    # The totals before each tile, warp and thread are these, shifted by one place.
    before_tile = _shifted(tiles, neutral)[0]
    before_warp = _shifted(warps, neutral)
    before_thread = _shifted(threads, neutral)
    before_in_tile = combine(before_warp[..., None], before_thread)
    before = combine(before_tile[:, None, None], before_in_tile)
    before = before.reshape(len(blocks), -1, 1)  # [tiles, threads, 1]

    scanned = _in_order(torch.cat([before, blocks], -1), combine)[..., 1:]
    return scanned.reshape(-1)[: len(entries)]


def _by_warp(totals: Tensor, combine: _Combine) -> Tensor:
    """Scan the last dimension, of _WARP lanes, with distances that double: every lane adds the lane that far before it."""
    shift = 1
    while shift < _WARP:
        first = totals[..., :shift]
        others = combine(totals[..., shift:], totals[..., :-shift])
        totals = torch.cat([first, others], -1)
        shift *= 2
    return totals


def _shifted(totals: Tensor, neutral: float) -> Tensor:
    """Entries of the last dimension moved to the next place, after a neutral first one."""
    first = torch.full_like(totals[..., :1], neutral)
    return torch.cat([first, totals[..., :-1]], -1)


def transformed_lengths(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Lengths of a Fourier transform's dimensions; of a half spectrum, the length of the real signal."""
    given = arguments_of(target, args, kwargs, defaults=True)
    if "n_fft" in given:
        return [given["n_fft"]]
    x = tensors_in((args, kwargs))[0]
    sizes = _several(given.get("n", given.get("s")))
    dims = _several(given["dim"]) or list(range(-len(sizes), 0)) or list(range(x.dim()))
    lengths = [x.shape[dim] for dim in dims]
    gives_signal = any(name in str(target) for name in ("irfft", "hfft", "c2r")) and "ihfft" not in str(target)
    if dims and gives_signal:
        lengths[-1] = given.get("last_dim_size", 2 * (lengths[-1] - 1))
    for place, size in enumerate(sizes):
        if size > 0:
            lengths[place] = size
    return lengths


def _several(given: Any) -> list[int]:
    if given is None:
        return []
    return [given] if isinstance(given, int) else list(given)
