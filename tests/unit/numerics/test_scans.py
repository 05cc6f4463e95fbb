"""Running sums and recurrent layers in half, against CUDA's kernels followed thread by thread."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import auditor
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from tests.support.subjects import normal, seeded

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


def test_the_emulated_run_adds_in_half_in_place_and_with_gradients() -> None:
    with auditor.emulate("cuda"):
        x = torch.ones(1, 4096, 2).half().requires_grad_()
        y = x.cumsum(1)
        y[0, 10].sum().backward()
        written = torch.ones(1, 4096, 2).half()
        assert written.cumsum_(1) is written
        mapped = torch.vmap(lambda row: row.cumsum(0))(torch.ones(2, 8).half())
    assert float(y.detach().max()) == float(written.max()) == 2048
    assert x.grad[0, :, 0].tolist() == [1.0] * 11 + [0.0] * 4085
    assert mapped[1].tolist() == list(range(1, 9))


# Steps of recurrent cells and layers in half, against float32 modules whose products are exact.


def whole_numbers(*shape: int) -> Tensor:
    """Products of these are exact in half."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).float() / 2


def filled(cell: nn.RNNCellBase) -> nn.RNNCellBase:
    with torch.no_grad():
        for weight in cell.parameters():
            weight.copy_(whole_numbers(*weight.shape))
    return cell


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_a_step_rounds_its_products_and_its_results(kind: type[nn.RNNCellBase], bias: bool, dtype: torch.dtype) -> None:
    cell = filled(kind(5, 7, bias=bias))
    x, state = whole_numbers(4, 5), whole_numbers(4, 7)
    given = (state, state) if kind is nn.LSTMCell else state
    op = aten.lstm_cell.default if kind is nn.LSTMCell else aten.gru_cell.default
    weights = [weight.detach().to(dtype) for weight in cell.parameters()]
    low = [state.to(dtype)] * 2 if kind is nn.LSTMCell else state.to(dtype)
    with torch.no_grad():
        found, wide = run_op(op, (x.to(dtype), low, *weights), {}), cell(x, given)
    results = zip(found, wide, strict=True) if kind is nn.LSTMCell else [(found, wide)]
    for ours, exact in results:
        assert ours.dtype is dtype
        # up to the last place of the format: sums in float32 differ in theirs
        assert torch.allclose(ours.float(), exact.to(dtype).float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert (ours == exact.to(dtype)).float().mean() > 0.9


def test_products_are_rounded_before_the_gates() -> None:
    state = torch.zeros(1, 1).half()
    to_gates, bias = torch.tensor([[0.0], [-20.0], [2048.0]]).half(), torch.tensor([0.0, 0.0, -2048.0]).half()
    x = torch.full((1, 1), 1 + 2**-10).half()  # 2050 is what half holds, and 2050 - 2048 = 2
    found = run_op(
        aten.gru_cell.default, (x, state, to_gates, torch.zeros(3, 1).half(), bias, torch.zeros(3).half()), {}
    )
    assert torch.equal(found, torch.tensor([[2.0]]).tanh().half())


LAYERS: list[type[nn.RNNBase]] = [nn.GRU, nn.LSTM, nn.RNN]


def low_layer(module: nn.RNNBase, x: Tensor, dtype: torch.dtype, train: bool = False) -> tuple[Any, ...]:
    """Arguments of the operation, in a format; states begin at 1/2."""
    op = getattr(aten, module.mode.lower()).input
    ways, batch = 1 + module.bidirectional, x.shape[0 if module.batch_first else 1]
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)[: 1 + (module.mode == "LSTM")]
    states = [torch.full((module.num_layers * ways, batch, size), 0.5, dtype=dtype) for size in sizes]
    weights = [w.detach().to(dtype).requires_grad_() for w in module._flat_weights]
    how = module.bias, module.num_layers, module.dropout, train, module.bidirectional, module.batch_first
    return op, (x.to(dtype), states if len(states) > 1 else states[0], weights, *how)


def by_cells(kind: type[nn.RNNBase], x: Tensor, states: Any, weights: list[Tensor], each: int, ways: int) -> Tensor:
    """The output of the layers, one step of a cell after the other. Shape of x: [t, b, i]."""
    lstm, op = kind is nn.LSTM, aten.lstm_cell.default if kind is nn.LSTM else aten.gru_cell.default
    for layer in range(len(weights) // (each * ways)):
        outputs = []
        for index in range(layer * ways, (layer + 1) * ways):
            state = [s[index] for s in states] if lstm else states[index]
            seen = []
            for row in x.flip(0) if index > layer * ways else x:
                state = run_op(op, (row, state, *weights[index * each : (index + 1) * each]), {})
                seen.append(state[0] if lstm else state)
            outputs.append(torch.stack(seen[::-1] if index > layer * ways else seen))
        x = torch.cat(outputs, -1)
    return x


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_layer_is_its_cell_step_after_step(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    for both, bias, first in product((False, True), repeat=3):
        module = seeded(lambda: kind(5, 6, 2, bidirectional=both, bias=bias, batch_first=first))  # noqa: B023
        x = normal(4, 3, 5)
        op, args = low_layer(module, x, dtype)
        with torch.no_grad():
            found = run_op(op, args, {})
            rows = args[0].transpose(0, 1) if first else args[0]
            expected = by_cells(kind, rows, args[1], args[2], 4 if bias else 2, 1 + both)
        assert found[0].dtype is dtype
        assert torch.equal(found[0], expected.transpose(0, 1) if first else expected)
        assert [x.shape for x in found] == [x.shape for x in op(*args)]
        assert [x.stride() for x in found] == [x.stride() for x in op(*args)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_a_plain_layer_rounds_its_products_and_its_states(nonlinearity: str, dtype: torch.dtype) -> None:
    module = seeded(lambda: nn.RNN(5, 6, nonlinearity=nonlinearity))
    op, (x, state, weights, *how) = low_layer(module, normal(4, 3, 5), dtype)
    with torch.no_grad():
        found, _ = run_op(op, (x, state, weights, *how), {})
        of_input, of_state, *biases = (w.float() for w in weights)
        now = state[0].float()
        for row, output in zip(x.float(), found, strict=True):
            products = [(a @ b.T).to(dtype).float() for a, b in ((row, of_input), (now, of_state))]
            total = products[0] + biases[0] + (products[1] + biases[1])
            now = (total.tanh() if nonlinearity == "tanh" else total.relu()).to(dtype).float()
            assert torch.equal(output.float(), now)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_sequences_of_several_lengths_are_each_what_they_are_alone(kind: type[nn.RNNBase], both: bool) -> None:
    module, lengths = seeded(lambda: kind(5, 6, 2, bidirectional=both)), [4, 2, 1]
    op, (x, states, weights, *how) = low_layer(module, normal(4, 3, 5), torch.float16)
    packed = pack_padded_sequence(x, torch.tensor(lengths))
    with torch.no_grad():
        found = run_op(op.overloadpacket.data, (packed.data, packed.batch_sizes, states, weights, *how[:-1]), {})
        outputs, _ = pad_packed_sequence(packed._replace(data=found[0]))
        for index, length in enumerate(lengths):
            own = [s[:, index : index + 1] for s in states] if kind is nn.LSTM else states[:, index : index + 1]
            alone = run_op(op, (x[:length, index : index + 1], own, weights, *how), {})
            torch.testing.assert_close(outputs[:length, index], alone[0][:, 0], rtol=2**-9, atol=2**-12)
            torch.testing.assert_close(found[1][:, index], alone[1][:, 0], rtol=2**-9, atol=2**-12)


def test_a_projection_is_one_more_product() -> None:
    module = seeded(lambda: nn.LSTM(5, 6, 2, proj_size=3, bidirectional=True))
    op, args = low_layer(module, normal(4, 3, 5), torch.float16)
    wide, states = module(normal(4, 3, 5), tuple(s.float() for s in args[1]))
    for found, exact in zip(run_op(op, args, {}), (wide, *states), strict=True):
        assert found.shape == exact.shape
        assert 0 < (found.float() - exact).norm() < 2e-3 * exact.norm()


def test_what_is_dropped_between_layers_is_what_torch_drops() -> None:
    module = seeded(lambda: nn.GRU(5, 64, 2, dropout=0.5))
    op, args = low_layer(module, normal(4, 3, 5), torch.float16, train=True)
    runs = []
    for run in (lambda: op(*args), lambda: run_op(op, args, {})):
        torch.manual_seed(0)
        runs.append(run()[0].float())
    assert (runs[0] - runs[1]).norm() < 5e-3 * runs[0].norm()


def test_a_layer_and_its_input_are_of_one_dtype() -> None:
    op, (x, *args) = low_layer(nn.GRU(5, 6), normal(4, 3, 5), torch.float16)
    with pytest.raises(UnsupportedInFormat, match="different dtypes, float16 and float32"):
        run_op(op, (x.float(), *args), {})


@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_of_training_in_an_emulated_run(kind: type[nn.RNNBase]) -> None:
    layer, x = seeded(lambda: kind(8, 8, 2, bidirectional=True, batch_first=True)), normal(2, 5, 8)
    with auditor.emulate():
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                plain = layer(x)[0]
            output = layer(x)[0]
        output.float().pow(2).sum().backward()
    assert torch.equal(plain, output)
    low = [w.grad.clone() for w in layer.parameters() if w.grad is not None]
    layer.zero_grad()
    layer(x)[0].pow(2).sum().backward()
    assert len(low) == len(list(layer.parameters()))
    for ours, weight in zip(low, layer.parameters(), strict=True):
        assert weight.grad is not None and 0 < (ours - weight.grad).norm() < 0.02 * weight.grad.norm()
