"""What a format does to single nodes, each answer worked out beside it."""

import gc
import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.execution.execute import Executor
from auditor.measure import attribute
from auditor.measure.attribute import first_order
from auditor.measure.measure import Measurement, measure
from auditor.numerics.nodes import tensors_in
from auditor.records import NodeError
from tests.support.brute_force import true_isolated
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.subjects import FORMATS, effects_of, measurement_of, nodes_by_op, normal, only, seeded, subject_of


def error_of(measured: Measurement, packet: str, fmt: str) -> NodeError:
    return measured.errors[only(measured.capture, packet).name][fmt]


def errors_of(function: object, *inputs: Tensor, packet: str) -> tuple[NodeError, NodeError]:
    """(fp16, bf16) of the one node of an operation."""
    measured = measurement_of(Function(function), *inputs)
    return error_of(measured, packet, "fp16"), error_of(measured, packet, "bf16")


def test_an_overflow() -> None:
    fp16, bf16 = errors_of(lambda x: x * x, torch.tensor([300.0, 2.0]), packet="mul")
    # 300^2 = 90000 is beyond 65504
    assert (fp16.overflow, fp16.nan, fp16.cause, fp16.originates_here) == (1, 0, "overflow", True)
    assert (fp16.local_error, fp16.max_ulp, fp16.sqnr_db) == (math.inf, math.inf, -math.inf)
    # bf16 spaces by 512 there: 90000 / 512 = 175.8, so 176 * 512 = 90112; the 4 beside it is exact
    assert bf16.overflow == 0
    assert bf16.local_error == pytest.approx(112 / math.hypot(90000, 4), rel=1e-6)
    assert bf16.max_ulp == pytest.approx(112 / 512)
    assert bf16.sqnr_db == pytest.approx(20 * math.log10(math.hypot(90000, 4) / 112))
    assert (bf16.cause, bf16.originates_here) == ("rounding", False)


def test_an_underflow() -> None:
    fp16, bf16 = errors_of(lambda x: x * x, torch.tensor([1e-5]), packet="mul")
    # 1e-5 is 168 / 2^24 in fp16 (subnormal); its square 1e-10 is below half of 2^-24 = 6e-8
    assert (fp16.underflow, fp16.local_error, fp16.cause) == (1.0, 1.0, "underflow")
    assert (fp16.overflow, fp16.originates_here) == (0, False)
    assert (bf16.underflow, bf16.cause) == (0.0, "rounding")


def test_subnormal_results_are_counted_apart() -> None:
    fp16, _ = errors_of(lambda x: x * 1.0, torch.tensor([2.0**-14, 2.0**-15, 2.0**-24, 0.0]), packet="mul")
    # below the smallest normal 2^-14 lie two of the three non-zero entries, all of them values of fp16
    assert (fp16.subnormal, fp16.underflow, fp16.local_error, fp16.cause) == (2 / 3, 0.0, 0.0, None)


def test_a_cancellation() -> None:
    fp16, bf16 = errors_of(lambda x, y: x - y, torch.tensor([1 + 1.25 * 2**-9]), torch.tensor([1.0]), packet="sub")
    # fp16 spaces by 2^-10 at 1: 1 + 2.5 * 2^-10 is a tie and goes to 1 + 2 * 2^-10; 0.5 of 2.5 is lost
    assert fp16.local_error == pytest.approx(0.2)
    assert fp16.cause == "cancellation"
    # bf16 spaces by 2^-7: nothing of the difference is left
    assert bf16.local_error == 1.0


def test_a_literal_that_does_not_fit_one_format() -> None:
    fp16, bf16 = errors_of(lambda x: x.masked_fill(x > 0, -1e9), torch.tensor([1.0, -1.0]), packet="masked_fill")
    assert fp16.unsupported == "masked_fill has the constant -1e+09, outside the range of FP16 (±65504)"
    # -998244352 for -1e9: 1755648 / 1e9
    assert bf16.unsupported is None
    assert bf16.local_error == pytest.approx(1755648 / math.hypot(1e9, 1), rel=1e-6)


def test_masks_of_minus_infinity_are_not_overflows() -> None:
    fp16, bf16 = errors_of(lambda x: x.masked_fill(x > 0, -math.inf), torch.tensor([1.0, -1.0]), packet="masked_fill")
    for error in (fp16, bf16):
        assert (error.overflow, error.nan, error.local_error, error.cause, error.originates_here) == (
            0,
            0,
            0.0,
            None,
            False,
        )


def test_a_dropout_that_draws_scales_what_it_keeps() -> None:
    measured = measurement_of(
        Function(lambda x: nn.functional.dropout(x * 2, 0.99, training=True)), torch.full((4096,), 350.0)
    )
    values = measured.values[only(measured.capture, "dropout").name]
    kept = int((values != 0).sum())
    assert kept > 0
    # 700 / (1 - 0.99) = 70000 is beyond 65504; bf16 holds it, as 137 * 512 = 70144
    assert measured.ranges["dropout"].max_abs == pytest.approx(70000, rel=1e-5)
    assert error_of(measured, "dropout", "fp16").overflow == kept
    assert error_of(measured, "dropout", "bf16").local_error == pytest.approx(144 / 70000, rel=1e-2)


def test_in_place_operations_do_not_change_what_was_measured_before_them() -> None:
    def branches(x: Tensor) -> Tensor:
        y = x * 3
        if float(y.sum()) > 0:
            y.add_(1)
        return y * 2

    x = torch.tensor([1.0, 2.0])
    measured = measurement_of(Function(branches), x)
    first, last = nodes_by_op(measured.capture, "mul")
    assert measured.values[first.name].tolist() == [3.0, 6.0]
    assert measured.values[last.name].tolist() == [8.0, 14.0]
    assert measured.errors[first.name]["fp16"].local_error == 0.0
    assert measured.errors[last.name]["fp16"].propagated_error == 0.0
    assert x.tolist() == [1.0, 2.0]


def test_an_empty_tensor_has_no_error() -> None:
    fp16, _ = errors_of(lambda x: x.exp(), torch.empty(0, 3), packet="exp")
    assert (fp16.local_error, fp16.propagated_error, fp16.overflow, fp16.max_ulp) == (0.0, 0.0, 0, 0.0)


def test_float64_and_integer_nodes_are_measured_as_they_are() -> None:
    measured = measurement_of(Function(lambda x: (x.double().exp().float(), (x * 10).long() + 1)), torch.tensor([1.5]))
    # 1.5 is a value of fp16, and float64 stays: all that is left is that profiles are kept in FP32
    assert error_of(measured, "exp", "fp16").local_error < 2**-24
    assert error_of(measured, "add", "fp16").disagreement == 0.0


def _block() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        up = m.up(m.norm(x))
        return x + m.down(up * torch.sigmoid(1.7 * up))

    return Model(forward, norm=nn.LayerNorm(16), up=nn.Linear(16, 64), down=nn.Linear(64, 16))


def _blocks() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(_block() for _ in range(8))), normal(4, 32, 16)


def _held(measured: Measurement) -> int:
    """Bytes of all tensors of a measurement that are no weights."""
    names = [place.name for place in measured.capture.placeholders if place.kind == "parameter"]
    weights = {x.untyped_storage().data_ptr() for name in names for x in measured.live[name]}
    kept = [value for name in measured.values if (value := measured.values._stored.get(name)) is not None]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_in(kept)}
    return sum(size for place, size in storages.items() if place not in weights)


def test_a_measurement_holds_fp32_values_alone() -> None:
    model, x = _blocks()
    saved: dict[int, int] = {}

    def note(one: torch.Tensor) -> torch.Tensor:
        saved[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
        total = model(x).square().sum()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    step = sum(size for place, size in saved.items() if place not in weights)
    assert total.requires_grad  # all that it saved is there still
    measured = measurement_of(model, x)
    assert _held(measured) < 1.2 * step
    assert {type(part) for by in measured.traces.values() for one in by.values() for part in astuple(one)} == {
        str,
        bool,
    }


def _residual() -> nn.Module:
    """Autograd keeps the ReLU's result; the sum follows from the norm, and the norm from the convolution."""
    parts = {"conv": nn.Conv2d(3, 3, 3, padding=1), "norm": nn.BatchNorm2d(3)}
    return Model(lambda m, x: (m.norm(m.conv(x)) + x).relu(), **parts)


def _chain(x: Tensor) -> Tensor:
    """`first` is needed to compute `second` again, and has a later reader itself."""
    first = x * 2
    second = first + 1
    return second * 3 + first


@pytest.mark.parametrize(
    ("model", "x", "released"),
    [
        (lambda: normed(nn.BatchNorm2d(8), by_batch=False), normal(4, 3, 8, 8), {"batch_norm"}),
        (_block, normal(4, 32, 16), {"mul"}),
        (lambda: Function(_chain), normal(4, 4), {"add"}),
        (_residual, normal(4, 3, 8, 8), {"batch_norm", "add"}),
    ],
)
def test_values_that_are_not_stored_are_computed_again_bit_for_bit(
    model: Callable[[], nn.Module], x: Tensor, released: set[str]
) -> None:
    measured = measurement_of(seeded(model), x)
    assert {name for name in measured.values if measured.values._stored.get(name) is None} >= released
    with torch.no_grad():
        for n, result in Executor(measured.capture.graph_module).steps(*measured.flat_inputs):
            assert n.op != "call_function" or torch.equal(measured.values[n.name], result), n.name


def test_nothing_stays_of_a_measurement_once_its_effects_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute, "LIGHT", 0)  # the last backward passes then stop early, and free only what they pass

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    gc.collect()
    gc.freeze()  # what earlier tests left may be freed meanwhile, and does not count
    try:
        model, x = _blocks()
        first_order(measurement_of(model, x))
        before = tensors()
        first_order(measurement_of(model, x))
        assert tensors() == before
    finally:
        gc.unfreeze()


def normed(norm: nn.Module, by_batch: bool) -> nn.Module:
    """A norm that writes its running statistics, or reads them, as `norm` does."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.norm.train(by_batch)
        return m.norm(m.conv(x)).relu().mean((2, 3))

    return Model(forward, conv=nn.Conv2d(3, 8, 3), norm=norm)


@pytest.mark.parametrize("by_batch", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_norms_with_running_statistics(norm: type[nn.Module], by_batch: bool) -> None:
    model = seeded(lambda: normed(norm(8, track_running_stats=True), by_batch))
    subject = subject_of(model, normal(4, 3, 12, 12))
    captured = capture(subject, FORMATS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured = measure(captured, model, subject.batches[0], FORMATS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = effects_of(measured)
    for node in (only(measured.capture, packet).name for packet in ("conv2d", "relu", "mean")):
        for fmt in FORMATS:
            assert 0.4 < found[node][fmt].isolated / true_isolated(measured, node, fmt) < 2.5, node
