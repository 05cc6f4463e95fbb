"""Layers under quantization schemes: effects against the model itself, quantized by hand, and causes that were planted."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor import audit
from auditor.document.read import load
from auditor.measure.layers import spans_of
from auditor.numerics.quantize import fake_quantize
from auditor.numerics.schemes import SCHEMES
from auditor.records.audit import Audit
from auditor.records.quantization import QuantizedLayer
from auditor.reporters import html, text
from auditor.snippets import snippet
from tests.support.quantizing import by_hand, change, fp8_alone
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded

WIDTH = 64


def block() -> nn.Module:
    """Attention with a fused weight, and a gated layer between norms."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
        x = x + m.out((q @ k.transpose(-1, -2) / 8).softmax(-1) @ v)
        return x + m.down(torch.tanh(m.up(m.norm2(x))))

    first = {"norm": nn.LayerNorm(WIDTH), "qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)}
    second = {"norm2": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 128), "down": nn.Linear(128, WIDTH)}
    return Model(forward, **first, **second)


def whole() -> nn.Module:
    """An embedding, a block, a convolution and a head."""
    ends = {"embed": nn.Embedding(40, WIDTH), "block": block()}
    heads = {"conv": nn.Conv1d(WIDTH, 32, 3, padding=1), "head": nn.Linear(32, 10)}
    return Model(lambda m, x: m.head(m.conv(m.block(m.embed(x)).transpose(1, 2)).transpose(1, 2)), **ends, **heads)


LAYERS = {"embed", "block.qkv", "block.out", "block.up", "block.down", "conv", "head"}


def net(plant: Callable[[nn.Module], None] = lambda model: None) -> nn.Module:
    model = seeded(whole)
    with torch.no_grad():
        plant(model)
    return model


def ids(seed: int = 0, batch: int = 4) -> Tensor:
    return torch.randint(0, 40, (batch, 16), generator=torch.Generator().manual_seed(seed))


def audited(model: nn.Module, *batches: Tensor, **settings: object) -> Audit:
    inputs = [(x,) for x in batches] if len(batches) > 1 else batches[0]
    return audit(model, inputs, strategies="cast", quick=True, **{"max_error": 1e-3, **settings})


def layer(found: Audit, owner: str, scheme: str) -> QuantizedLayer:
    return next(x for x in found.quantization if (x.owner, x.scheme) == (owner, scheme))


SOME = ("fp8", "mxfp8", "int8", "int8_asymmetric", "int4", "mxfp4", "nvfp4")


@pytest.fixture(scope="module")
def some() -> tuple[nn.Module, Audit]:
    model = net()
    return model, audited(model, ids(), formats=SOME)


def test_every_layer_is_measured_under_every_scheme(some: tuple[nn.Module, Audit]) -> None:
    _, found = some
    assert {(x.owner, x.scheme) for x in found.quantization} == {(owner, s) for owner in LAYERS for s in SOME}
    assert found.formats == ("bf16",)  # the layers that are not quantized


@pytest.mark.parametrize("scheme", SOME)
def test_effects_are_those_of_the_model_quantized_by_hand(some: tuple[nn.Module, Audit], scheme: str) -> None:
    model, found = some
    for owner in LAYERS - {"conv"} | ({"conv"} if scheme == "int4" else set()):
        measured, expected = layer(found, owner, scheme), change(model, by_hand(model, {owner: scheme}), ids())
        assert measured.decided_by == "re-run"  # all are above a quarter of this budget
        assert measured.effect == pytest.approx(expected, rel=1e-4)


def test_first_order_predicts_what_runs_measure(some: tuple[nn.Module, Audit]) -> None:
    model, ran = some
    predicted = audited(model, ids(), formats=("fp8", "int8", "int4"), max_error=10.0)
    assert {x.decided_by for x in predicted.quantization} == {"first-order"}
    assert {x.verdict.verdict for x in predicted.quantization} == {"safe"}
    ratios = [x.effect / layer(ran, x.owner, x.scheme).effect for x in predicted.quantization]
    assert sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios) >= 0.9 * len(ratios), sorted(ratios)


def test_verdicts_follow_the_budget() -> None:
    found = audited(net(), ids(), formats="fp8", max_error=0.02)
    assert {x.verdict.verdict for x in found.quantization} == {"safe", "sensitive", "unsafe"}
    for x in found.quantization:
        share = x.effect / 0.02
        assert x.verdict.verdict == ("safe" if share <= 0.25 else "sensitive" if share <= 1 else "unsafe")
        assert bool(x.remedy) == (share > 0.25)


def test_a_criterion_decides_instead_of_the_error_budget() -> None:
    model = net()
    found = audited(model, ids(), formats="int4", criteria="output: max_abs <= 0.1")
    one = layer(found, "block.up", "int4")
    with torch.no_grad():
        most = float((by_hand(model, {"block.up": "int4"})(ids()) - model(ids())).abs().max())
    assert one.effect == pytest.approx(most / 0.1, rel=1e-3)
    assert one.criterion == "output: max_abs <= 0.1"


def test_beyond_the_run_limit_an_effect_that_needs_a_run_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.measure.layers.MAX_RUNS", 0)
    found = audited(net(), ids(), formats="int8", criteria="output: max_abs <= 0.1")  # no gradient says this
    assert {(x.decided_by, x.verdict.verdict, x.remedy) for x in found.quantization} == {("not-run", "untested", "")}
    found = audited(net(), ids(), formats="int8", max_error=1e-4)
    assert {(x.decided_by, x.verdict.verdict) for x in found.quantization} == {("first-order", "unsafe")}


def test_effects_are_the_worst_over_the_batches() -> None:
    model, x, y = net(), ids(0), ids(1)
    both = audited(model, x, y, formats="nvfp4")
    for owner in LAYERS - {"conv"}:
        worst = max(change(model, by_hand(model, {owner: "nvfp4"}), batch) for batch in (x, y))
        assert layer(both, owner, "nvfp4").effect == pytest.approx(worst, rel=1e-4)


def plant_outlier(model: nn.Module) -> None:
    model.block.norm2.weight[7] *= 100  # undone by the weight: the model stays the same function
    model.block.norm2.bias[7] *= 100
    model.block.up.weight[:, 7] /= 100


def test_a_planted_outlier_channel_of_an_activation_is_named(some: tuple[nn.Module, Audit]) -> None:
    found = audited(net(plant_outlier), ids(), formats="int8,fp8")
    one = layer(found, "block.up", "int8")
    assert (one.part, one.cause, one.place) == ("activation", "outlier channel", "input channel 7")
    assert one.activation_error > 5 * layer(some[1], "block.up", "int8").activation_error
    others = [x for x in found.quantization if x.scheme == "int8" and x.owner != "block.up"]
    assert {x.place for x in others} == {""}
    assert layer(found, "block.up", "fp8").place == ""  # FP8 has an exponent of its own


def plant_weight_outlier(model: nn.Module) -> None:
    model.block.down.weight[:, 3] *= 60
    model.block.down.weight[:, 90] *= 60


def plant_many_large_channels(model: nn.Module) -> None:
    """One large entry in each row of a weight: 0.46 in one of 8 channels in most rows, 0.44 in one of 12 in the others."""
    weight = model.block.out.weight
    weight.uniform_(-0.02, 0.02)
    for row in range(len(weight)):
        channel, size = (8 + row % 12, 0.44) if row % 7 == 0 else (row % 8, 0.46)
        weight[row, channel] = size


def test_channels_that_are_hardly_larger_than_others_are_no_outliers() -> None:
    found = audited(net(plant_many_large_channels), ids(), formats="int8_weights")
    assert layer(found, "block.out", "int8_weights").cause != "outlier channel"
    assert "block.out" not in {one.owner for one in found.findings if one.rule == "QNT001"}


def test_planted_outlier_channels_of_a_weight_are_named() -> None:
    one = layer(audited(net(plant_weight_outlier), ids(), formats="int8_weights"), "block.down", "int8_weights")
    assert (one.part, one.cause, one.place) == ("weight", "outlier channel", "input channels 3, 90")


def plant_slice(model: nn.Module) -> None:
    model.block.qkv.weight[:WIDTH] *= 1000  # queries, undone by the keys: the model stays the same function
    model.block.qkv.bias[:WIDTH] *= 1000
    model.block.qkv.weight[WIDTH : 2 * WIDTH] /= 1000  # in units of the tensor's scale about 4e-4, which is zero
    model.block.qkv.bias[WIDTH : 2 * WIDTH] /= 1000


def test_a_planted_bad_slice_of_a_fused_weight_is_named_with_its_remedy() -> None:
    model, x, budget = net(plant_slice), ids(), 0.02  # rows are safe, the tensor is not
    assert change(net(), model, x) < 1e-5
    found = audited(model, x, formats="fp8_tensor", max_error=budget)
    one = layer(found, "block.qkv", "fp8_tensor")
    assert (one.part, one.cause, one.place) == ("weight", "slice", "slice 2 of 3, output channels 64 to 127")
    assert one.zeroed >= WIDTH * WIDTH
    by_rows = change(model, by_hand(model, {"block.qkv": "fp8"}), x)
    assert one.effect > budget > 4 * by_rows
    assert (one.remedy, one.remedied) == ("fp8", pytest.approx(by_rows, rel=1e-4))
    others = [x for x in found.quantization if x.owner != "block.qkv"]
    assert {(x.cause, x.place) for x in others} == {("rounding", "")}


@pytest.mark.parametrize(("way", "low", "high"), [("split", 32, 47), ("unbind", 32, 63), ("slice", 32, 63)])
def test_slices_are_those_that_the_model_takes(way: str, low: int, high: int) -> None:
    """Query, key and value from one weight, which the model takes apart in one of the usual ways."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.qkv(x)
        if way == "split":
            q, k, v = y.split([32, 16, 16], -1)
            q = q.unflatten(-1, (2, 16)).sum(-2)
        elif way == "unbind":
            q, k, v = y.unflatten(-1, (3, 32)).unbind(-2)
        else:
            q, k, v = y[..., :32], y[..., 32:64], y[..., 64:]
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    model = seeded(lambda: Model(forward, qkv=nn.Linear(32, 64 if way == "split" else 96, bias=False)))
    with torch.no_grad():
        model.qkv.weight[:32] *= 1000
        model.qkv.weight[low : high + 1] /= 1000
    one = layer(audited(model, normal(2, 8, 32), formats="fp8_tensor"), "qkv", "fp8_tensor")
    assert (one.cause, one.place) == ("slice", f"slice 2 of 3, output channels {low} to {high}")


def test_a_row_that_takes_the_range_of_a_tensor_is_named() -> None:
    def plant(model: nn.Module) -> None:
        model.block.qkv.weight[5] *= 1e5
        model.block.qkv.weight[WIDTH + 5] /= 1e5

    one = layer(audited(net(plant), ids(), formats="fp8_tensor"), "block.qkv", "fp8_tensor")
    assert (one.part, one.cause, one.place) == ("weight", "outlier row", "output channel 5")


@pytest.mark.parametrize("texts", [1, 6, 16, 40])
def test_outlier_tokens_are_named_however_many_there_are(texts: int) -> None:
    """The first token of every text is a hundred times larger, and takes the range of the static scale."""
    x = normal(texts, 12, WIDTH, seed=1)
    x[:, 0] *= 100
    model = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    one = layer(audited(model, x, formats="int8_static", max_error=0.02), "0", "int8_static")
    rows = [12 * i for i in range(texts)]
    more = f" and {texts - 8} more" if texts > 8 else ""
    expected = f"row{'s' * (texts > 1)} {', '.join(map(str, rows[:8]))}{more}"
    assert (one.part, one.cause, one.place) == ("activation", "outlier row", expected)
    assert one.remedy == "int8"


@pytest.mark.parametrize("bad", [1, 3])
def test_a_planted_activation_site_is_named(bad: int) -> None:
    """Of five linear layers one reads spikes beside its input, in another channel for every row."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for number, one in enumerate(m.layers):
            x = nn.functional.layer_norm(x, (WIDTH,))
            x = one(x + m.spikes if number == bad else x)
        return x

    def make() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        return Model(forward, layers=layers, spikes=40 * torch.eye(WIDTH)[:32])

    model = seeded(make)
    ranked = sorted(audited(model, normal(32, WIDTH), formats="int8").quantization, key=lambda one: -one.effect)
    assert (ranked[0].owner, ranked[0].part) == (f"layers.{bad}", "activation")
    assert ranked[0].effect > 1.5 * ranked[1].effect
    assert ranked[0].activation_effect > 2 * ranked[0].weight_effect


def plant_zeros(model: nn.Module) -> None:
    model.head.weight[4] = 0.0


def test_a_row_of_zeros_is_judged_per_library() -> None:
    """torchao turns it into NaN, so that its code leaves the layer in 16 bits; zero rows of other libraries stay zero."""
    model, x = net(plant_zeros), ids()
    found = audited(model, x, formats="fp8", max_error=0.2)
    one = layer(found, "head", "fp8")
    with torch.no_grad():
        reference, quantized = model(x), fp8_alone(model, "head", least=1e-12)(x)
    assert one.effect == pytest.approx(float((quantized - reference).norm() / reference.norm()), rel=1e-3)
    assert (one.verdict.verdict, one.zero_blocks) == ("safe", "weight")
    assert {other.zero_blocks for other in found.quantization if other.owner != "head"} == {""}
    assert found.quantized_plans[0].layers["head"] == "fp8"
    assert "head (fp8, a row or block of zeros becomes NaN)" in " ".join(
        snippet(found, "torchao", "fp8").replace("\n# ", " ").split()
    )
    assert "'head'" in snippet(found, "compressed-tensors", "fp8").partition("'ignore'")[0]
    shown = " ".join(text(found, width=200, color=False, most=100).split())
    assert "torchao turns rows of zeros into NaN: the weights of head, which the code leaves in 16 bits." in shown


def test_padding_makes_no_layer_unsafe() -> None:
    """Token 0 is padding, whose row of the embedding is zero: one row of the inputs of `up` is zero."""

    def make() -> nn.Module:
        parts = {"embed": nn.Embedding(40, WIDTH, padding_idx=0), "up": nn.Linear(WIDTH, WIDTH, bias=False)}
        return Model(lambda m, x: m.up(m.embed(x)), **parts)

    model, x = seeded(make), ids().index_fill(1, torch.tensor([0, 1]), 0)
    found = audited(model, x, formats="fp8", max_error=0.2)
    one = layer(found, "up", "fp8")
    with torch.no_grad():
        reference, quantized = model(x), fp8_alone(model, "up", least=1e-12)(x)
    assert one.effect == pytest.approx(float((quantized - reference).norm() / reference.norm()), rel=0.5)
    assert (one.verdict.verdict, one.zero_blocks) == ("safe", "activation")
    assert found.quantized_plans[0].layers["up"] == "fp8"
    assert "activation_value_lb=1e-12, granularity=PerRow()" in snippet(found, "torchao", "fp8")
    assert "activation_value_lb" not in snippet(
        audited(model, ids().clamp(min=1), formats="fp8", max_error=0.2), "torchao", "fp8"
    )


def test_torchao_gives_nan_for_a_row_of_zeros_unless_its_scale_is_bounded() -> None:
    torchao = pytest.importorskip("torchao.quantization.quant_primitives", exc_type=ImportError)
    x = torch.tensor([[0.0, 0.0], [3.0, -5.0]])
    for least, expected in ((None, math.nan), (1e-12, 0.0)):
        scale = torchao._choose_scale_float8(x, [1, 2], hp_value_lb=least)
        made = torchao._quantize_affine_float8(x, scale, torch.float8_e4m3fn).float() * scale
        assert torch.equal(made[0].nan_to_num(9.0), torch.full((2,), expected).nan_to_num(9.0))
        assert torch.equal(made[1], fake_quantize(x[1:], SCHEMES["fp8"].weight).values[0])


def test_static_scales_come_from_all_calibration_inputs() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    small, large = torch.rand(4, 8), 100 * torch.rand(4, 8)
    apart = layer(audited(model, small, formats="int8_static"), "0", "int8_static").activation_error
    together = audited(model, small, large, formats="int8_static")
    assert layer(together, "0", "int8_static").activation_error > 20 * apart  # of the small batch, now in large steps


def test_padding_does_not_widen_static_scales() -> None:
    """The padding token's embedding is a hundred times larger than any other."""

    def forward(m: Any, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return m.up(m.embed(ids)) * attention_mask[..., None]

    model = seeded(lambda: Model(forward, embed=nn.Embedding(40, WIDTH), up=nn.Linear(WIDTH, WIDTH)))
    with torch.no_grad():
        model.embed.weight[0] *= 100
    tokens = ids().clamp(min=1).index_fill(1, torch.tensor([0, 1]), 0)
    (low, high) = spans_of(model, ("int8_static",), [((tokens, (tokens > 0).long()), {})], 0)["up"]
    assert max(high, -low) > 100  # a mask without its name
    batch = ((tokens,), {"attention_mask": (tokens > 0).long()})
    span = spans_of(model, ("int8_static",), [batch], 0)["up"]
    values = model.embed(tokens)[tokens > 0].detach()
    assert span == (pytest.approx(float(values.min())), pytest.approx(float(values.max())))


def test_one_scale_for_a_depthwise_weight_loses_its_small_channels() -> None:
    model = seeded(lambda: nn.Conv2d(16, 16, 3, groups=16, bias=False))
    with torch.no_grad():
        model.weight *= torch.logspace(-4, 0, 16)[:, None, None, None]
    x = normal(2, 16, 8, 8)
    found = audited(nn.Sequential(model), x, formats="int8_tensor,int8_weights", max_error=0.5)
    by_tensor, by_row = (layer(found, "0", scheme) for scheme in ("int8_tensor", "int8_weights"))
    scale = model.weight.abs().max() / 127.5
    lost = (model.weight / scale).round() == 0
    assert by_tensor.zeroed >= int(lost.sum()) > model.weight.numel() / 3 > by_row.zeroed


def test_reports_and_files_show_the_layers(some: tuple[nn.Module, Audit], tmp_path) -> None:
    _, found = some
    shown = " ".join(text(found, width=200, color=False, most=100).split())
    layers = [x for x in found.quantization if x.scheme == "nvfp4" and x.has_kernel]
    worst = max(layers, key=lambda x: x.effect)
    assert {x.owner for x in layers} == {owner for owner in LAYERS if owner.startswith("block.")}
    said = "NVFP4: 0 of 4 layers can be quantized safely; no kernel fits 3 others."
    assert f"{said} The worst, `{worst.owner}` (" in shown
    assert f"), is unsafe, with an effect of {worst.effect:.2g} on the outputs. The cause is rounding of " in shown
    assert " Remedy: do not quantize this layer." in shown
    assert "torchao: NVFP4DynamicActivationNVFP4WeightConfig()" in html(found)
    found.save(tmp_path)
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["quantization"]
    assert len(written) == len(found.quantization)
    assert [x.place for x in load(tmp_path).quantization] == [x.place for x in found.quantization]


def switch(choose: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Eight experts that differ; `choose` weighs them."""
    parts = {
        "router": nn.Linear(WIDTH, 8, bias=False),
        "experts": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)),
    }

    def forward(m: Any, x: Tensor) -> Tensor:
        weights = choose(m, x)
        return sum(expert(x) * weights[:, i, None] for i, expert in enumerate(m.experts))

    model = seeded(lambda: Model(forward, **parts))
    for expert in model.experts:
        nn.init.normal_(expert.weight, 0, 0.3)
    return model


def by_argmax(m: Any, x: Tensor) -> Tensor:
    return F.one_hot(m.router(x).argmax(-1), 8).float()


def by_top_two(m: Any, x: Tensor) -> Tensor:
    values, chosen = m.router(x).softmax(-1).topk(2, -1)
    return torch.zeros(len(x), 8).scatter(-1, chosen, values / values.sum(-1, keepdim=True))


def by_threshold(m: Any, x: Tensor) -> Tensor:
    scores = m.router(x).softmax(-1)
    return scores * (scores > 0.125)


@pytest.mark.parametrize("choose", [by_argmax, by_top_two, by_threshold])
def test_the_effect_of_a_layer_on_a_choice_is_measured(choose: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """First order sees the weights of the chosen experts, not that others are chosen."""
    model, x = switch(choose), normal(512, WIDTH, seed=1)
    with torch.no_grad():
        reference, quantized = model(x), fp8_alone(model, "router")(x)
    alone = float((quantized - reference).norm() / reference.norm())
    found = audited(model, x, formats="fp8", max_error=0.1)
    router = layer(found, "router", "fp8")
    assert router.decided_by == "re-run"
    assert router.effect == pytest.approx(alone, rel=1e-3)
    assert router.verdict.verdict == ("unsafe" if alone > 0.1 else "sensitive" if alone > 0.025 else "safe")
    assert layer(found, "experts.0", "fp8").decided_by == "first-order"  # downstream of the choice
    (one,) = found.quantized_plans
    assert one.layers["router"] == "" or alone <= 0.1


def to_nearest(x: Tensor) -> Tensor:
    """Entries of a table at the nearest of 64 places."""
    table = torch.arange(64.0).sin().view(1, 1, 8, 8)
    return F.grid_sample(table, x.tanh().view(1, -1, 1, 2), mode="nearest", align_corners=False).view(len(x), -1)


JUMPS = {
    "threshold": lambda x: F.threshold(x, 0.3, 0.0),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "round": torch.round,
    "floor division": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "copysign": lambda x: torch.copysign(torch.ones_like(x), x),
    "angle": lambda x: torch.atan2(x[:, :32], x[:, 32:]),
    "heaviside": lambda x: x + torch.heaviside(x, torch.ones(())),  # alone it is judged by the entries that flip
    "fake quantization": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -128, 127),
    "nearest entry": to_nearest,
}


@pytest.mark.parametrize("jump", JUMPS.values(), ids=JUMPS)
def test_the_effect_of_a_layer_on_a_jump_is_measured(jump: Callable[[Tensor], Tensor]) -> None:
    model = seeded(lambda: Model(lambda m, x: jump(m.layer(x)), layer=nn.Linear(WIDTH, WIDTH)))
    x = normal(256, WIDTH, seed=1)
    one = layer(audited(model, x, formats="fp8", max_error=10.0), "layer", "fp8")
    with torch.no_grad():
        reference, quantized = model(x), fp8_alone(model, "layer")(x)
    assert one.decided_by == "re-run"
    assert one.effect == pytest.approx(float((quantized - reference).norm() / reference.norm()), rel=1e-3)


class Exit(nn.Module):
    """A head for confident inputs, which Python code chooses, and a head after one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.early, self.late = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.threshold = 0.0

    def confidence(self, x: Tensor) -> Tensor:
        return self.early(self.first(x)).softmax(-1).amax(-1).mean()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.early(x).softmax(-1).amax(-1).mean() > self.threshold:
            return self.early(x)
        return self.late(self.second(x))


def test_the_effect_of_a_layer_on_a_branch_in_python_is_measured_by_the_model() -> None:
    """The recorded graph has only the branch that FP32 takes."""
    model, x = seeded(Exit), normal(64, WIDTH, seed=1)
    with torch.no_grad():
        exact, quantized = model.confidence(x), fp8_alone(model, "first").confidence(x)
        model.threshold = float((exact + quantized) / 2)  # so that rounding this layer flips the branch
        reference, other = model(x), fp8_alone(model, "first")(x)
    found = audited(model, x, formats="fp8", max_error=0.5)
    one = layer(found, "first", "fp8")
    assert (one.decided_by, one.verdict.verdict) == ("re-run", "unsafe")
    assert one.effect == pytest.approx(float((other - reference).norm() / reference.norm()), rel=1e-3)
    assert found.quantized_plans[0].layers["first"] == ""
    if float(exact) <= model.threshold:
        assert layer(found, "second", "fp8").decided_by == "first-order"  # no branch reads it


def test_a_layer_that_is_called_several_times_is_quantized_in_all_calls() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(m.cell(x))
        return m.head(x)

    model = seeded(lambda: Model(forward, cell=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 8)))
    nn.init.normal_(model.cell.weight, 0, 0.3)
    x = normal(64, WIDTH, seed=1)
    alone = change(model, by_hand(model, {"cell": "fp8"}), x)
    found = audited(model, x, formats="fp8", max_error=alone / 1.5)
    calls = [one for one in found.quantization if one.key == "cell"]
    assert len(calls) == 4
    assert {(one.decided_by, one.verdict.verdict) for one in calls} == {("re-run", "unsafe")}
    assert [one.effect for one in calls] == pytest.approx([alone] * 4, rel=1e-3)
    assert " of 2 layers can be quantized safely" in " ".join(text(found, width=200, color=False, most=100).split())
    loose = audited(model, x, formats="fp8", max_error=100 * alone)
    assert {one.decided_by for one in loose.quantization} == {"first-order"}
    assert {one.verdict.verdict for one in loose.quantization} == {"safe"}


def test_values_of_a_top_k_without_its_indices_are_no_choice() -> None:
    model = seeded(lambda: Model(lambda m, x: m.layer(x).topk(4, -1).values, layer=nn.Linear(WIDTH, WIDTH)))
    found = audited(model, normal(16, WIDTH), formats="fp8", max_error=10.0)
    assert layer(found, "layer", "fp8").decided_by == "first-order"


def test_beyond_the_run_limit_an_effect_on_a_choice_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.measure.layers.MAX_CHOICE_RUNS", 0)
    found = audited(switch(by_top_two), normal(64, WIDTH), formats="fp8", max_error=10.0)
    assert layer(found, "router", "fp8").verdict.verdict == "untested"
