"""A mobile net trained on digits: with one scale its depthwise layers collapse in INT8, and a scale per channel repairs them."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from auditor import audit
from auditor.features.quantization.report import quantization_lines
from auditor.records.audit import Audit
from auditor.records.quantization import QuantizedLayer
from auditor.report.words import ratio
from tests.support.subjects import normal
from tests.unit.measure.mobile_net import TRAINED_ON, digits, stored

COLLAPSES = "4.0"
"""The second depthwise layer."""
QUICKLY = {"strategies": "cast", "quick": True}
CAUSES = ("unequal channels", "outlier row")


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor]:
    """The net with its batch norms folded, and images that it was not trained on."""
    images, labels = digits()
    model = stored()
    others, answers = images[TRAINED_ON:], labels[TRAINED_ON:]
    with torch.no_grad():
        assert float((model(others).argmax(1) == answers).float().mean()) > 0.7
    return fuse(model).requires_grad_(False), others[:128]


def layer(found: Audit, owner: str, scheme: str) -> QuantizedLayer:
    return next(one for one in found.quantization if (one.owner, one.scheme) == (owner, scheme))


def steps_of(largest: Tensor) -> Tensor:
    return largest.clamp(min=2.0**-23 * 127.5) / 127.5


def in_int8(x: Tensor, step: Tensor) -> Tensor:
    return (x / step).round().clamp(-128, 127) * step


def quantize_by_loop(model: nn.Module, path: str, *, per_channel: bool) -> nn.Module:
    """A copy of the model in which one convolution's weight is in INT8, channel by channel."""
    other = copy.deepcopy(model)
    weight = other.get_submodule(path).weight
    shared = weight.abs().max()
    for channel in range(len(weight)):
        largest = weight[channel].abs().max() if per_channel else shared
        weight[channel] = in_int8(weight[channel], steps_of(largest))
    return other


def effect_by_loop(model: nn.Module, path: str, x: Tensor, *, per_channel: bool) -> float:
    """Relative change of the outputs with one convolution in INT8; its input has one scale."""
    other = quantize_by_loop(model, path, per_channel=per_channel)
    layer = other.get_submodule(path)
    layer.register_forward_pre_hook(lambda _, given: (in_int8(given[0], steps_of(given[0].abs().max())),))
    return relative(other(x), model(x))


def weight_error_by_loop(model: nn.Module, path: str, x: Tensor, *, per_channel: bool) -> float:
    """Relative change of the convolution's result with only its weight in INT8."""
    given = list[Tensor]()
    handle = model.get_submodule(path).register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(x)
    handle.remove()
    other = quantize_by_loop(model, path, per_channel=per_channel)
    return relative(other.get_submodule(path)(*given), model.get_submodule(path)(*given))


def relative(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).norm() / reference.norm())


@pytest.fixture(scope="module")
def found(trained: tuple[nn.Module, Tensor]) -> Audit:
    """An audit whose budget a scale per channel keeps, and one scale does not."""
    model, x = trained
    effects = [effect_by_loop(model, COLLAPSES, x, per_channel=each) for each in (False, True)]
    return audit(model, x, formats="int8_tensor,int8", max_error=math.prod(effects) ** 0.5, **QUICKLY)


def test_one_scale_collapses_a_depthwise_layer_and_the_audit_says_why(
    trained: tuple[nn.Module, Tensor], found: Audit
) -> None:
    model, _ = trained
    one = layer(found, COLLAPSES, "int8_tensor")
    largest = [float(channel.abs().max()) for channel in model.get_submodule(COLLAPSES).weight]
    assert max(largest) > 10 * min(largest)
    assert (one.verdict.verdict, one.part) == ("unsafe", "weight")
    assert one.cause in CAUSES
    if one.cause == "unequal channels":
        assert one.place == f"largest entries of the output channels: {min(largest):.3g} to {max(largest):.3g}"
    (finding,) = [f for f in found.findings if (f.rule, f.owner) == ("QNT007", COLLAPSES)]
    assert (finding.formats, finding.agrees) == (("int8_tensor",), True)
    assert one.place in finding.message


def test_a_scale_per_channel_repairs_it_by_as_much_as_a_loop_by_hand_says(
    trained: tuple[nn.Module, Tensor], found: Audit
) -> None:
    model, x = trained
    shared, own = (layer(found, COLLAPSES, scheme) for scheme in ("int8_tensor", "int8"))
    assert shared.decided_by == "re-run"
    assert shared.effect == pytest.approx(effect_by_loop(model, COLLAPSES, x, per_channel=False), rel=1e-3)
    repaired = effect_by_loop(model, COLLAPSES, x, per_channel=True)
    assert (shared.remedy, shared.remedied) == ("int8", pytest.approx(repaired, rel=1e-3))

    weights = [weight_error_by_loop(model, COLLAPSES, x, per_channel=each) for each in (False, True)]
    assert [shared.weight_error, own.weight_error] == pytest.approx(weights, rel=0.01)
    assert own.weight_error < 0.25 * shared.weight_error
    assert "unequal channels" not in own.cause


def test_a_sentence_gives_the_collapse_and_its_repair(found: Audit) -> None:
    said = " ".join(quantization_lines(found))
    in_one_scale = (one for one in found.quantization if one.scheme == "int8_tensor")
    worst = max(in_one_scale, key=lambda one: one.effect)
    assert f"The worst, `{worst.owner}` (conv2d), is unsafe, with an effect of {ratio(worst.effect)}" in said
    assert f"The cause is {worst.cause} of the weight ({worst.place}). Remedy:" in said
    assert f"quantize it as INT8 (effect {ratio(worst.remedied)})" in said
    assert "QNT007 confirmed" in said


def test_no_position_of_a_kernel_is_called_an_input_channel() -> None:
    """The middle of every kernel is large. A depthwise layer sums over positions, and over no channels."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3, groups=16, bias=False), nn.Conv2d(16, 8, 1))
    with torch.no_grad():
        model[0].weight[:, :, 1, 1] = 20.0
    found = audit(model, normal(2, 16, 8, 8), formats="int8", max_error=1e-3, **QUICKLY)
    one = layer(found, "0", "int8")
    assert one.cause != "outlier channel"
    assert one.place == ""


@pytest.mark.parametrize(("groups", "place"), [(1, "input channel 5"), (2, "input channel 5 of each group")])
def test_an_outlier_channel_of_a_kernel_is_numbered_as_the_input_has_it(groups: int, place: str) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, groups=groups, bias=False), nn.Conv2d(16, 8, 1))
    with torch.no_grad():
        model[0].weight[:, 5] *= 100.0
    found = audit(model, normal(2, 16, 8, 8), formats="int8_weights", max_error=1e-3, **QUICKLY)
    one = layer(found, "0", "int8_weights")
    assert (one.part, one.cause, one.place) == ("weight", "outlier channel", place)
