"""Running sums against CUDA's kernels, followed thread by thread as ScanUtils.cuh and cub's BlockScan write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.numerics.kernels import run_op

aten = torch.ops.aten
HALVES = [torch.float16, torch.bfloat16]


def cumsum(x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    found = run_op(aten.cumsum.default, (x, dim), kwargs)
    assert isinstance(found, Tensor)
    return found


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.rand(shape) + 0.1


def along_a_row(row: Tensor, threads: int) -> Tensor:
    """tensor_kernel_scan_innermost_dim_impl for one row: shared memory for two entries a thread."""
    found, total = [], torch.zeros((), dtype=row.dtype)
    for first in range(0, len(row), 2 * threads):
        buffer = [
            row[i] if i < len(row) else torch.zeros((), dtype=row.dtype) for i in range(first, first + 2 * threads)
        ]
        buffer[0] = buffer[0] + total
        step = 1
        while step <= threads:
            before = list(buffer)
            for thread in range(threads):
                a = (thread // step) * (2 * step) + step
                buffer[a + thread % step] = before[a + thread % step] + before[a - 1]
            step *= 2
        total = buffer[-1]
        found += buffer
    return torch.stack(found)[: len(row)]


def by_cub(row: Tensor) -> Tensor:
    """DeviceScan with 128 threads of 30 entries: thread, warp by shuffles, warps in order, tiles in order."""
    zero = torch.zeros((), dtype=row.dtype)
    found, tile_prefix = [], None
    for first in range(0, len(row), 3840):
        entries = [[row[i] if i < len(row) else zero for i in range(t, t + 30)] for t in range(first, first + 3840, 30)]
        sums = [sum(mine[1:], mine[0]) for mine in entries]
        for warp in range(4):
            lanes = sums[32 * warp : 32 * warp + 32]
            for shift in (1, 2, 4, 8, 16):
                lanes = [lanes[k] + lanes[k - shift] if k >= shift else lanes[k] for k in range(32)]
            sums[32 * warp : 32 * warp + 32] = lanes
        for thread, mine in enumerate(entries):
            warp, lane = divmod(thread, 32)
            parts = [sums[thread - 1]] if lane else []
            if warp:
                whole = sum((sums[32 * w + 31] for w in range(1, warp)), sums[31])
                parts = [whole + parts[0]] if parts else [whole]
            if tile_prefix is not None:
                parts = [tile_prefix + parts[0]] if parts else [tile_prefix]
            total = parts[0] if parts else zero
            for entry in mine:
                total = total + entry
                found.append(total)
        block = sum((sums[32 * w + 31] for w in range(1, 4)), sums[31])
        tile_prefix = block if tile_prefix is None else tile_prefix + block
    return torch.stack(found)[: len(row)]


@pytest.mark.parametrize("dtype", HALVES)
def test_an_outer_dimension_is_added_in_order(dtype: torch.dtype) -> None:
    x = numbers(2, 100, 3).to(dtype)
    total, expected = torch.zeros(2, 3, dtype=dtype), []
    for step in x.unbind(1):
        total = total + step
        expected.append(total)
    assert torch.equal(cumsum(x, 1), torch.stack(expected, 1))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "length", "threads"), [(2, 300, 256), (64, 40, 16), (3, 1200, 512)])
def test_the_last_dimension_is_added_in_tiles(dtype: torch.dtype, rows: int, length: int, threads: int) -> None:
    # log2 of the threads: (9 + ceil(log2(length)) - ceil(log2(rows))) / 2, between 4 and 9:
    # (9 + 9 - 1) / 2 = 8; (9 + 6 - 6) / 2 = 4; (9 + 11 - 2) / 2 = 9
    x = numbers(rows, length).to(dtype)
    found = cumsum(x, -1)
    for row in (0, rows - 1):
        assert torch.equal(found[row], along_a_row(x[row], threads))


@pytest.mark.parametrize("shape", [(100,), (1, 4000), (4000, 1)])
def test_one_dimension_that_holds_everything_goes_through_cub(shape: tuple[int, ...]) -> None:
    x = numbers(*shape).bfloat16()
    dim = max(range(len(shape)), key=shape.__getitem__)
    assert torch.equal(cumsum(x, dim).flatten(), by_cub(x.flatten()))


def test_ones_in_half_stay_where_numbers_are_two_apart() -> None:
    assert float(cumsum(torch.ones(1, 4096, 2).half(), 1).max()) == 2048
    assert float(cumsum(torch.ones(1, 4096, 2).bfloat16(), 1).max()) == 256
    assert float(torch.ones(4096).half().cumsum(0).max()) == 4096  # which this CPU does not do by itself


def test_products_and_sums_of_exponentials_are_rounded_at_every_step() -> None:
    x = torch.full((1, 12, 2), 256.0).half()
    x[:, 6:] = 1 / 256
    assert bool(run_op(aten.cumprod.default, (x, 1), {})[0, -1].isinf().all())  # infinite stays infinite
    # log(e^8 + ... + e^8) grows by less than half a spacing, 1 / 32, from log(n) on
    found = run_op(aten.logcumsumexp.default, (torch.full((1, 500, 2), 8.0).bfloat16(), 1), {})
    total = torch.tensor(8.0).bfloat16()
    for _ in range(499):
        total = torch.logaddexp(total.float(), torch.tensor(8.0)).bfloat16()
    assert float(found[0, -1, 0]) == float(total)
    assert float(total) < 8 + torch.tensor(500.0).log() - 0.5


def test_a_sum_in_float32_is_one() -> None:
    x = torch.ones(1, 4096, 2).half()
    assert float(cumsum(x, 1, dtype=torch.float32).max()) == 4096
    assert cumsum(x, 1, dtype=torch.float32).dtype is torch.float32


def test_empty_and_single_entries() -> None:
    assert cumsum(torch.ones(2, 0).half(), 1).shape == (2, 0)
    assert float(cumsum(torch.tensor(3.0).half(), 0)) == 3
    assert torch.equal(cumsum(torch.ones(3, 1).half(), 1), torch.ones(3, 1).half())


class Running(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def test_the_emulated_run_adds_in_half_in_place_and_with_gradients() -> None:
    with auditor.emulate("cuda"):
        x = torch.ones(1, 4096, 2).half().requires_grad_()
        y = x.cumsum(1)
        y[0, 10].sum().backward()
        written = torch.ones(1, 4096, 2).half()
        assert written.cumsum_(1) is written
        mapped = torch.vmap(lambda row: row.cumsum(0))(torch.ones(2, 8).half())
    assert float(y.detach().max()) == float(written.max()) == 2048
    assert x.grad is not None
    assert x.grad[0, :, 0].tolist() == [1.0] * 11 + [0.0] * 4085
    assert mapped[1].tolist() == list(range(1, 9))


def test_the_measurement_sees_what_the_kernel_loses() -> None:
    audit = auditor.audit(Running(), (torch.ones(1, 4096, 2),), formats=("bf16",))
    (node,) = (item for item in audit.nodes if item.node.op == "aten.cumsum.default")
    # from 256 on nothing arrives: sqrt(sum (n - 256)^2 / sum n^2), n from 257 to 4096, is 0.91
    assert node.errors["bf16"].local_error == pytest.approx(0.91, abs=0.01)
    assert node.verdicts["bf16"].verdict == "unsafe"
