"""Verdicts on pairs of small runs, each with the place that it must name."""

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor.errors import AuditorError
from auditor.features.compare import page
from auditor.features.compare.compare import Comparison, compare
from auditor.features.compare.fingerprint import sketch, sketch_distance
from auditor.features.compare.record import record_run
from auditor.features.compare.recording import Recording, read, to_json
from auditor.loading.subject import from_object
from auditor.report.blocks import to_terminal
from tests.features.compare import pages

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))


def seeded(made: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return made(*args, **kwargs).eval()


def run(model: nn.Module, *inputs: torch.Tensor, **how: Any) -> Recording:
    return record_run(from_object(model, [inputs or (X,)]), **how)


def first_code(found: Comparison) -> tuple[str, str]:
    first = found.places[0]
    return (first.a.code or "" if first.a else "", first.b.code or "" if first.b else "")


class Block(nn.Module):
    """Self-attention and a layer of two products, in forms that the tests choose."""

    def __init__(self, **form: Any) -> None:
        super().__init__()
        self.form = {"eps": 1e-5, "fused": False, "sdpa": False, "act": "none", "scale": 0.5} | form
        self.norm = nn.LayerNorm(16, eps=self.form["eps"])
        self.qkv = nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        if self.form["fused"]:
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            pairs = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
            q, k, v = (F.linear(x, weight, bias) for weight, bias in pairs)
        if self.form["sdpa"]:
            return F.scaled_dot_product_attention(q, k, v, scale=self.form["scale"])
        scores = q @ k.mT * self.form["scale"]
        return scores.softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.down(F.gelu(self.up(x), approximate=self.form["act"]))


def test_other_forms_of_the_same_function_are_equal() -> None:
    found = compare(run(seeded(Block)), run(seeded(Block, fused=True, sdpa=True)))
    assert found.verdict == "equal"
    assert found.outputs[0].difference < 1e-12
    assert 1e-9 < found.outputs[0].error_a < 1e-6


@pytest.mark.parametrize(
    ("form", "argument", "values", "code"),
    [
        ({"eps": 1e-6}, "eps", ("1e-05", "1e-06"), "self.norm(x)"),
        ({"act": "tanh"}, "approximate", (None, "tanh"), "F.gelu"),
        ({"scale": 0.25}, "other", ("0.5", "0.25"), "q @ k.mT"),
    ],
)
def test_the_argument_that_differs_is_named(form: Any, argument: str, values: Any, code: str) -> None:
    found = compare(run(seeded(Block)), run(seeded(Block, **form)))
    assert found.verdict == "differ"
    assert found.places[0].differing_literals == {argument: values}
    assert all(code in line for line in first_code(found))
    text = to_terminal(page.overview(found, ("a.json", "b.json")), 100, False)
    assert f"{argument} = {values[1]}" in text


def test_a_wrong_scale_is_found_in_a_port_that_fuses_it() -> None:
    found = compare(run(seeded(Block)), run(seeded(Block, sdpa=True, scale=0.25)))
    assert found.verdict == "differ"
    assert "q @ k.mT" in first_code(found)[0]
    assert "scaled_dot_product_attention" in first_code(found)[1]


class Written(nn.Module):
    """A layer norm, written out in B."""

    def __init__(self, eps: float, written: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.gain, self.bias = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.rand(16))
        self.eps, self.written = eps, written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if not self.written:
            return F.layer_norm(x, (16,), self.gain, self.bias, self.eps)
        centered = x - x.mean(-1, keepdim=True)
        variance = centered.square().mean(-1, keepdim=True)
        normed = centered * torch.rsqrt(variance + self.eps)
        return normed * self.gain + self.bias


def test_the_line_inside_a_norm_that_is_written_out() -> None:
    a = run(seeded(Written, 1e-5, False))
    assert compare(a, run(seeded(Written, 1e-5, True))).verdict == "equal"
    found = compare(a, run(seeded(Written, 1e-6, True)))
    assert "F.layer_norm" in first_code(found)[0]
    assert "torch.rsqrt(variance + self.eps)" in first_code(found)[1]


class Wired(nn.Module):
    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.layer, self.swapped = nn.Linear(16, 32), swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.layer(x).chunk(2, -1)
        gate, value = (parts[1], parts[0]) if self.swapped else parts
        return torch.sigmoid(gate) * value


def test_an_operation_that_reads_another_value() -> None:
    found = compare(run(seeded(Wired, False)), run(seeded(Wired, True)))
    assert (found.verdict, found.places[0].how) == ("differ", "inputs")
    assert all("torch.sigmoid(gate)" in code for code in first_code(found))
    assert [value.op for side in found.read for value in side] == ["getitem", "getitem"]


class Ordered(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer, self.out, self.wrong = nn.Linear(16, 16), nn.Linear(96, 4), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.layer(x).unflatten(-1, (6, -1)) if x.shape[-1] == 18 else self.layer(x)[:, :, :6]
        turned = heads.flip(1) if self.wrong else heads.transpose(1, 2).transpose(1, 2)
        return self.out(F.pad(turned.flatten(1), (0, 60)))


def test_numbers_in_another_order() -> None:
    found = compare(run(seeded(Ordered, False)), run(seeded(Ordered, True)))
    assert (found.verdict, found.places[0].how) == ("differ", "order")
    assert found.places[0].b is not None and found.places[0].b.packet == "flip"


def test_permuted_hidden_units_are_equal() -> None:
    a, b = seeded(Block), seeded(Block)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    b.up.weight.data, b.up.bias.data = b.up.weight[order].clone(), b.up.bias[order].clone()
    b.down.weight.data = b.down.weight[:, order].clone()
    assert compare(run(a), run(b)).verdict == "equal"


class Folded(nn.Module):
    def __init__(self, folded: bool, cap: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.convs = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))
        self.folded, self.cap = folded, cap
        for conv, norm in zip(self.convs, self.norms, strict=True):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            if folded:
                gain = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
                conv.weight.data *= gain[:, None, None]
                conv.bias.data = (conv.bias - norm.running_mean) * gain + norm.bias
        if folded:
            self.norms = nn.ModuleList(nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x))
            x = x.clamp(min=0, max=self.cap)
        return x


def test_folded_norms_are_equal_but_for_stored_roundings() -> None:
    found = compare(run(Folded(False).eval()), run(Folded(True).eval()))
    assert found.verdict == "stored"
    assert "convs.0.weight" in {pair[0].owner for pair in found.stored if pair[0] is not None}


def test_a_bug_beside_folded_norms_is_found() -> None:
    found = compare(run(Folded(False).eval()), run(Folded(True, cap=0.5).eval()))
    assert found.verdict == "differ"
    assert all("x.clamp" in code for code in first_code(found))


def test_batch_splits_are_equal() -> None:
    model = seeded(Block)
    whole = run(model)
    halves = record_run(from_object(model, [(X[:2],), (X[2:],)]))
    assert halves.batches == 2
    assert compare(whole, halves).verdict == "equal"


class Padded(nn.Module):
    """Rows beyond `count` are padding, which B fills with other numbers."""

    def __init__(self, fill: float, slope: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.fill, self.slope = fill, slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = torch.arange(6) < 4
        x = torch.where(keep[:, None], x, self.fill)
        for layer in self.layers:
            x = F.leaky_relu(layer(x), self.slope)
        return torch.where(keep[:, None], x, 0.0)


def test_padding_does_not_mislead() -> None:
    a = run(seeded(Padded, 0.0))
    assert compare(a, run(seeded(Padded, 3.0))).verdict == "equal"
    found = compare(a, run(seeded(Padded, 3.0, slope=0.2)))
    assert all("F.leaky_relu" in code for code in first_code(found))


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight if tied else nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def test_tied_weights_equal_untied_copies() -> None:
    tokens = torch.arange(6).view(2, 3)
    found = compare(run(seeded(Tied, True), tokens), run(seeded(Tied, False), tokens))
    assert found.verdict == "equal"


def test_a_wrong_weight_is_named() -> None:
    b = seeded(Block)
    b.up.weight.data[3, 4] += 0.01
    found = compare(run(seeded(Block)), run(b))
    assert found.verdict == "differ"
    assert found.places[0].a is not None and found.places[0].a.owner == "up.weight"


class Cell(nn.Module):
    """An LSTM, or its steps written out, perhaps with two gates in each other's place."""

    def __init__(self, written: bool, swapped: bool = False) -> None:
        super().__init__()
        self.lstm, self.written, self.swapped = nn.LSTM(16, 8, batch_first=True), written, swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.written:
            return self.lstm(x)[0].tanh()
        weights = self.lstm
        hidden = cell = torch.zeros(len(x), 8)
        steps = list[torch.Tensor]()
        for step in x.unbind(1):
            read = F.linear(step, weights.weight_ih_l0, weights.bias_ih_l0)
            gates = read + F.linear(hidden, weights.weight_hh_l0, weights.bias_hh_l0)
            enter, keep, new, leave = gates.chunk(4, -1)
            if self.swapped:
                enter, keep = keep, enter
            entering = enter.sigmoid() * new.tanh()
            cell = keep.sigmoid() * cell + entering
            hidden = leave.sigmoid() * cell.tanh()
            steps.append(hidden)
        return torch.stack(steps, 1).tanh()


def test_the_line_inside_a_recurrent_layer_that_is_written_out() -> None:
    a = run(seeded(Cell, False))
    assert compare(a, run(seeded(Cell, True))).verdict == "equal"
    found = compare(a, run(seeded(Cell, True, True)))
    assert "self.lstm(x)" in first_code(found)[0]
    assert "enter.sigmoid() * new.tanh()" in first_code(found)[1]


class Standardized(nn.Module):
    def __init__(self, loaded: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", torch.linspace(-1, 1, 16) if loaded else torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - self.mean)


def test_a_buffer_that_was_not_loaded_is_named_in_both_runs() -> None:
    first = compare(run(seeded(Standardized, True)), run(seeded(Standardized, False))).places[0]
    assert first.a is not None and first.b is not None
    assert (first.a.owner, first.b.owner) == ("mean", "mean")


# Precision.


class Island(nn.Module):
    """A softmax in FP32, or in the dtype of its input."""

    def __init__(self, island: bool) -> None:
        super().__init__()
        self.first, self.second, self.island = nn.Linear(16, 16), nn.Linear(16, 16), island

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.first(x)
        if self.island:
            scores = scores.float()
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        shares = shares / shares.sum(-1, keepdim=True)
        return self.second(shares.to(x.dtype))


def test_autocast_is_the_same_function_with_more_rounding() -> None:
    model = seeded(Block)
    found = compare(run(model), run(model, autocast=torch.bfloat16))
    assert found.verdict == "rounding"
    assert found.roundings[0].side == "B"
    assert found.roundings[0].at.dtype == "bfloat16"
    assert found.outputs[0].error_b > 100 * found.outputs[0].error_a


def test_a_checkpoint_in_bf16_is_named() -> None:
    found = compare(run(seeded(Block)), run(seeded(Block).to(torch.bfloat16)))
    assert found.verdict in ("stored", "rounding")
    assert {(a.dtype, b.dtype) for a, b in found.stored if a and b} == {("float32", "bfloat16")}


def test_weights_that_were_stored_in_bf16_before_are_named() -> None:
    found = compare(run(seeded(Block)), run(seeded(Block).to(torch.bfloat16).float()))
    assert found.verdict == "stored"
    assert {b.fits for _, b in found.stored if b is not None and b.owner.endswith("up.weight")} == {"bfloat16"}
    text = to_terminal(page.overview(found, ("a", "b")), 100, False)
    assert "up.weight: float32 in A; up.weight: float32 with values of bfloat16 in B" in text
    assert 1e-4 < found.outputs[0].difference < 1e-2


def test_a_lost_island_of_fp32_is_named() -> None:
    a, b = seeded(Island, True).to(torch.bfloat16), seeded(Island, False).to(torch.bfloat16)
    found = compare(run(a), run(b))
    assert found.verdict == "rounding"
    first = found.roundings[0]
    assert (first.side, first.at.dtype) == ("B", "bfloat16")
    assert first.other is not None and first.other.dtype == "float32"
    assert "scores" in (first.at.code or "")


class Cast(nn.Module):
    def __init__(self, low: bool) -> None:
        super().__init__()
        self.layers, self.low = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), low

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.low and index == 1:
                x = x.half().float()
        return x


def test_the_cast_that_rounds_is_named() -> None:
    found = compare(run(seeded(Cast, False)), run(seeded(Cast, True)))
    assert found.verdict == "rounding"
    assert [(one.side, one.at.code, one.at.dtype) for one in found.roundings] == [
        ("B", "x = x.half().float()", "float16")
    ]
    assert found.roundings[0].is_cast


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 8), nn.Parameter(torch.randn(8, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        return (flat[:, None] @ self.experts[chosen])[:, 0] * weight[:, None]


def test_flips_of_a_router_are_counted_apart_from_rounding() -> None:
    model = seeded(Router)
    x = torch.randn(64, 32, 16, generator=torch.Generator().manual_seed(5))
    found = compare(run(model, x), run(model, x, autocast=torch.bfloat16))
    assert found.verdict == "rounding"
    assert [flip.side for flip in found.flips] == ["B"]
    assert 0 < found.flips[0].share < 0.1
    assert found.outputs[0].error_b < 0.02  # with the run's own decisions: a flip replaces whole rows


# Gradients.


class Detached(nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.first, self.second, self.detached = nn.Linear(16, 16), nn.Linear(16, 16), detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        kept = h.detach() if self.detached else h
        return self.second(h) * kept


def test_the_same_outputs_with_other_gradients() -> None:
    found = compare(run(seeded(Detached, False), gradients=True), run(seeded(Detached, True), gradients=True))
    assert found.verdict == "gradients"
    assert {change.a.owner for change in found.gradients} == {"first.weight", "first.bias"}
    first = found.gradients[0]
    assert first.at_b is not None and first.at_b.packet == "detach"
    assert first.at_a is not None and "self.second(h) * kept" in (first.at_a.code or "")


def test_a_frozen_parameter_is_named() -> None:
    b = seeded(Detached, False)
    b.second.weight.requires_grad_(False)
    found = compare(run(seeded(Detached, False), gradients=True), run(b, gradients=True))
    assert [(change.a.owner, change.how) for change in found.gradients] == [
        ("second.weight", "frozen in B, trained in A")
    ]


class Clip(torch.autograd.Function):
    """A clamp with a backward of its own, which is wrong by `factor` or lets all gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.clamp(-0.3, 0.3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        inside = x.abs() <= 0.3
        return gradient * inside * ctx.factor, None


class Clipped(nn.Module):
    def __init__(self, factor: float | None, hooked: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.factor, self.hooked = nn.Linear(16, 16), nn.Linear(16, 16), factor, hooked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.hooked and h.requires_grad:
            h.register_hook(lambda gradient: 0.1 * gradient)
        h = h.clamp(-0.3, 0.3) if self.factor is None else Clip.apply(h, self.factor)
        return self.second(h)


def test_a_right_backward_of_ones_own_is_equal() -> None:
    found = compare(run(seeded(Clipped, None), gradients=True), run(seeded(Clipped, 1.0), gradients=True))
    assert found.verdict == "equal"
    assert found.not_compared == ()


@pytest.mark.parametrize("factor", [0.9, 0.0])
def test_a_wrong_backward_of_ones_own_is_named(factor: float) -> None:
    found = compare(run(seeded(Clipped, None), gradients=True), run(seeded(Clipped, factor), gradients=True))
    assert found.verdict == "gradients"
    assert {change.a.owner for change in found.gradients} == {"first.weight", "first.bias"}
    text = " ".join(to_terminal(page.overview(found, ("a", "b")), 100, False).split())
    assert "Gradients of B" in text and "Clip (test_compare_runs.py:" in text


def test_a_cast_to_low_precision_is_no_backward_of_ones_own() -> None:
    found = compare(run(seeded(Cast, False), gradients=True), run(seeded(Cast, True), gradients=True))
    assert found.verdict == "rounding"
    assert found.gradients == ()


def test_equal_backwards_of_ones_own_are_equal() -> None:
    found = compare(run(seeded(Clipped, 0.5), gradients=True), run(seeded(Clipped, 0.5), gradients=True))
    assert found.verdict == "equal"


def test_a_hook_that_changes_gradients_is_found() -> None:
    found = compare(run(seeded(Clipped, None), gradients=True), run(seeded(Clipped, None, True), gradients=True))
    assert found.verdict == "gradients"
    assert "such as a hook" in to_terminal(page.overview(found, ("a", "b")), 100, False)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise NotImplementedError("no backward")


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Failing.apply(self.layer(x))


def test_a_backward_that_fails_is_named_as_not_compared() -> None:
    recording = run(seeded(Fails), gradients=True)
    assert any("the backward of Failing (test_compare_runs.py:" in note for note in recording.not_compared)
    assert all(parameter.grad is None for parameter in seeded(Fails).parameters())


# Files, inputs, and what is not compared.


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_alone_takes_less_than_1_kb_for_a_value(kind: type[nn.Module]) -> None:
    recording = run(seeded(kind, 16, 16, num_layers=2, bidirectional=True), torch.randn(40, 4, 16))
    assert len(to_json(recording)) < 1000 * len(recording.values)
    assert any(value.inner for value in recording.values.values())


def test_a_file_has_no_tensors_and_less_than_1_kb_for_a_value(tmp_path) -> None:
    recording = run(seeded(Block))
    text = to_json(recording)
    assert len(text) < 1000 * len(recording.values)
    numbers = sum(isinstance(leaf, float) for leaf in _leaves(json.loads(text)))
    assert numbers < 40 * len(recording.values)
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    again = read(tmp_path / "a.json")
    assert [*again.values] == [*recording.values]
    assert compare(again, recording).verdict == "equal"
    assert to_json(again) == text


def _leaves(data: Any) -> list[Any]:
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in _leaves(value)]
    return [leaf for value in data for leaf in _leaves(value)] if isinstance(data, list) else [data]


def test_a_file_names_the_dtype_in_which_weights_were_stored_before(tmp_path) -> None:
    (tmp_path / "a.json").write_text(to_json(run(seeded(Block).to(torch.bfloat16).float())), encoding="utf-8")
    values = read(tmp_path / "a.json").values.values()
    assert next(value.fits for value in values if value.owner == "up.weight") == "bfloat16"


def test_other_inputs_are_refused() -> None:
    model = seeded(Block)
    with pytest.raises(AuditorError, match="different inputs") as error:
        compare(run(model), run(model, X + 1))
    assert error.value.slug == "other-inputs"
    with pytest.raises(AuditorError, match="different inputs"):
        compare(run(model), run(model, X[:, :5]))


@pytest.mark.parametrize("text", ["{", "[]", '{"plans": {}}', '{"kind": "recording of a run", "version": 0}'])
def test_other_files_are_refused(text: str, tmp_path) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(AuditorError) as error:
        read(tmp_path / "a.json")
    assert error.value.slug == "bad-recording"


def test_the_model_is_unchanged() -> None:
    model = seeded(Block)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    run(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    assert torch.get_default_dtype() is torch.float32


class Lone(nn.Module):
    def __init__(self, more: bool) -> None:
        super().__init__()
        self.layer, self.more = nn.Linear(16, 16), more

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"y": y, "hidden": y.tanh()} if self.more else {"y": y}


def test_an_output_of_one_run_only_is_listed() -> None:
    found = compare(run(seeded(Lone, False)), run(seeded(Lone, True)))
    assert found.verdict == "equal"
    assert "output hidden: only B has it" in found.not_compared


def test_page_and_data() -> None:
    found = compare(run(seeded(Block)), run(seeded(Block, eps=1e-6)))
    html = page.render(found, ("a.json", "b.json"))
    assert "eps = 1e-06" in html and "self.norm(x)" in html
    assert "http" not in html.partition("<body>")[2]
    data = json.loads(json.dumps(page.to_data(found, ("a.json", "b.json"))))
    assert data["verdict"] == "differ"
    assert data["places"][0]["literals"] == {"eps": ["1e-05", "1e-06"]}


def test_the_page_has_a_line_for_each_note_and_shows_code_as_code() -> None:
    shown = pages.differing()
    assert f"<li><code>{pages.CODE}</code></li>" in shown
    assert "<li>differs: eps = 1e-06</li>" in shown
    for note in pages.NOTES:
        assert f"<li>Not compared: {note}.</li>" in shown
    assert shown.count("The runs differ: first at") == 1
    assert "<li>torch: 2.13.0 in A, 2.14.1 in B</li>" in pages.rounding()


@pytest.mark.parametrize("changed", [slice(None), slice(0, None, 16), slice(0, 300)])
def test_sketches_estimate_a_distance(changed: slice) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.clone()
    y[changed] *= 1 + 1e-3
    exact = float((x - y).norm() / x.norm())
    assert sketch_distance(*sketch(x, y)) == pytest.approx(exact, rel=0.6)
    assert sketch_distance(*sketch(x[:1], y[:1])) == pytest.approx(1e-3, rel=0.01)


def test_inputs_that_differ_by_a_rounding_are_accepted() -> None:
    model = seeded(Block)
    up = torch.arange(X.numel()).view(X.shape) % 7 < 3
    other = torch.nextafter(X, torch.where(up, math.inf, -math.inf))
    found = compare(run(model), run(model, other))
    assert found.verdict == "stored"
    assert "input x: it differs by a rounding" in found.not_compared
