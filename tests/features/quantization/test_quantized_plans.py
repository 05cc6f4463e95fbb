"""Plans of quantization schemes: planted models, all choices in turn, and plans run by hand."""

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor import audit
from auditor.artefact.libraries import quantized_plan
from auditor.asked import validate
from auditor.criteria.measure import Criteria
from auditor.document.read import load
from auditor.errors import PlanError
from auditor.features.quantization.choices import Choice, ChoiceRun, Group, Search, Verified
from auditor.features.quantization.report import _remedy
from auditor.features.quantization.search import QuantizedPlans
from auditor.features.quantization.unseen import bound_of
from auditor.flow import run
from auditor.loading.subject import from_object
from auditor.measure.layers import change_of
from auditor.measure.rerun import OutputMetric
from auditor.numerics.schemes import SCHEMES
from auditor.plan.costs import Cost, quantized_seconds
from auditor.plan.search import MARGIN
from auditor.records.quantization import QuantizedPlan
from auditor.reporters import html, text
from auditor.results import Audit
from auditor.settings import Settings
from auditor.snippets import snippet
from tests.support.quantizing import by_hand, change
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

WIDTH = 64


def expert() -> nn.Module:
    parts = {"gate": nn.Linear(WIDTH, 128), "up": nn.Linear(WIDTH, 128), "down": nn.Linear(128, WIDTH)}
    return Model(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **parts)


def attention() -> nn.Module:
    parts = {name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"}
    return Model(lambda m, x: m.o(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x))), **parts)


class Decoder(nn.Module):
    """A tied embedding, two blocks of attention with a gated layer or two experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(32, WIDTH), nn.ModuleList(attention() for _ in range(2))
        self.mlp, self.experts = expert(), nn.ModuleList(expert() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention[0](self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        x = x + self.attention[1](self.norms[2](x))
        y = self.norms[3](x)
        x = x + sum(expert(y) for expert in self.experts)
        return self.head(self.norms[4](x))


def ids(seed: int) -> Tensor:
    return torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(seed))


def audited(model: nn.Module, x: Tensor, *held_out: Tensor, **settings: object) -> Audit:
    asked = {"strategies": "cast", "quick": True, "max_error": 0.05, **settings}
    subject = from_object(model, x, {})
    others = tuple(((y,), {}) for y in held_out)
    return Audit.of(run(replace(subject, held_out=others), validate(Settings, asked)))


def plan(found: Audit, name: str) -> QuantizedPlan:
    return next(one for one in found.quantized_plans if one.name == name)


def twins() -> nn.Module:
    """Two layers with equal effects, side by side."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in "ab"}
    return Model(lambda m, x: torch.cat([m.a(x), m.b(x.flip(0))], -1), **layers)


def test_two_layers_within_the_budget_alone_but_not_together_are_not_both_quantized() -> None:
    model, x = seeded(twins), normal(32, WIDTH, seed=1)
    alone = [change(model, by_hand(model, {name: "fp8"}), x) for name in "ab"]
    both = change(model, by_hand(model, {"a": "fp8", "b": "fp8"}), x)
    allowed = 1.1 * max(alone)
    assert both > 1.1 * allowed
    found = audited(model, x, formats="fp8", max_error=allowed / MARGIN)
    assert {layer.verdict.verdict for layer in found.quantization} == {"sensitive"}
    (one,) = found.quantized_plans
    assert sorted(one.layers.values()) == ["", "fp8"]
    assert one.effective_bits == 12.0
    assert one.calibration_error == pytest.approx(min(alone), rel=0.2)
    (both_fit,) = audited(model, x, formats="fp8", max_error=1.05 * both / MARGIN).quantized_plans
    assert set(both_fit.layers.values()) == {"fp8"}
    assert both_fit.predicted_error == pytest.approx(both, rel=0.25)
    assert both_fit.single_errors == pytest.approx(sum(alone), rel=0.25)


def halves() -> nn.Module:
    """A layer for each half of the input; both results have the same norm, though one has twice the weights."""
    a, b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
    b.weight.data *= math.sqrt(2)
    return Model(lambda m, x: torch.cat([m.a(x[:, :WIDTH]), m.b(x[:, WIDTH:])], -1), a=a, b=b)


def test_if_held_out_inputs_refuse_one_layer_another_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.features.quantization.search.bound_of", lambda *_: 0.0)
    checked, verify = list[Verified](), QuantizedPlans._verify
    monkeypatch.setattr(QuantizedPlans, "_verify", lambda *of: checked.append(verify(*of)) or checked[-1])
    model, x = seeded(halves), normal(32, 2 * WIDTH, seed=1)
    alone = {name: change(model, by_hand(model, {name: "fp8"}), x) for name in "ab"}
    assert alone["a"] == pytest.approx(alone["b"], rel=0.1)
    allowed = 1.1 * max(alone.values())
    (first,) = audited(model, x, formats="fp8", max_error=allowed / MARGIN).quantized_plans
    assert first.layers == {"a": "fp8", "b": ""}  # more weights than in b
    # four times the first half: a has 16 / 17 of the squared error instead of 1 / 2, and b has 1 / 17
    held_out = x * torch.tensor([4.0, 1.0]).repeat_interleave(WIDTH)
    checked.clear()
    (other,) = audited(model, x, held_out, formats="fp8", max_error=allowed / MARGIN).quantized_plans
    assert other.layers == {"a": "", "b": "fp8"}
    assert other.held_out_error == pytest.approx(alone["b"] * math.sqrt(2 / 17), rel=0.1)
    assert max(one.error for one in checked) > allowed
    assert all(one.error == max(one.measured, one.held_out) for one in checked)  # a near miss counts as one


@pytest.mark.parametrize("seed", thinned(range(6)))
def test_a_plan_has_about_the_fewest_bits_that_both_inputs_allow(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers side by side, whose squared errors add up; each has another share of them on the held-out inputs. The
    allowance for unseen inputs, which no sum of measured errors knows, is left out."""
    monkeypatch.setattr("auditor.features.quantization.search.bound_of", lambda *_: 0.0)
    draw, count = random.Random(seed), 8
    sizes = [draw.choice([32, 64, 96, 128]) for _ in range(count)]
    names = [f"part{i}" for i in range(count)]

    def side_by_side() -> nn.Module:
        layers = {name: nn.Linear(WIDTH, size, bias=False) for name, size in zip(names, sizes, strict=True)}
        return Model(lambda m, x: torch.cat([getattr(m, name)(x[i]) for i, name in enumerate(names)], -1), **layers)

    model = seeded(side_by_side)
    factors = torch.tensor([math.exp(draw.gauss(0, 1)) for _ in range(count)])[:, None, None]
    x = normal(count, 16, WIDTH, seed=seed)
    squares = [[change(model, by_hand(model, {name: "fp8"}), y) ** 2 for name in names] for y in (x, x * factors)]
    allowed = math.sqrt(sum(squares[0]) / 2)
    low = torch.tensor(list(itertools.product((0.0, 1.0), repeat=count)))
    fits = (low @ torch.tensor(squares).T <= allowed**2).all(1)
    least = 16 - 8 * float((low[fits] @ torch.tensor(sizes).float()).max()) / sum(sizes)
    (found,) = audited(model, x, x * factors, formats="fp8", max_error=allowed / MARGIN).quantized_plans
    assert found.held_out_error is not None
    assert max(found.calibration_error, found.held_out_error) <= allowed
    assert least <= found.effective_bits <= 1.06 * least


def test_a_mixed_plan_is_no_larger_than_the_accepted_plan_of_one_scheme() -> None:
    x = normal(32, 2 * WIDTH, seed=1)
    found = audited(seeded(halves), x, x.flip(0), formats="fp8,int8_weights", max_error=0.2)
    assert [one.effective_bits for one in found.quantized_plans] == [8.0, 8.0, 8.0]


def test_a_held_out_error_that_is_no_number_refuses_a_plan() -> None:
    def metric(reference: list[Tensor], candidate: list[Tensor]) -> float:
        differs = not torch.equal(reference[0], candidate[0])
        return math.nan if differs and float(reference[0].abs().max()) > 1e3 else 0.1 * differs

    x = normal(32, 2 * WIDTH, seed=1)
    asked = {"formats": "fp8", "max_error": 1.0, "metric": metric}
    (found,), (other,) = (audited(seeded(halves), x, y, **asked).quantized_plans for y in (x, 1e4 * x))
    assert (set(found.layers.values()), set(other.layers.values())) == ({"fp8"}, {""})


@pytest.fixture(scope="module")
def decoder() -> tuple[nn.Module, Audit]:
    model = seeded(Decoder)
    return model, audited(model, ids(0), ids(1), ids(2), formats="fp8,int8_weights,nvfp4", max_error=0.06)


def test_layers_that_run_as_one_kernel_have_one_scheme(decoder: tuple[nn.Module, Audit]) -> None:
    _, found = decoder
    experts = {f"experts.{i}.{name}" for i in range(2) for name in ("gate", "up", "down")}
    expected = [{"mlp.gate", "mlp.up"}, experts, {"embed", "head"}]
    expected += [{f"attention.{i}.{name}" for name in "qkv"} for i in range(2)]
    assert len(found.quantized_plans) == 4
    for one in found.quantized_plans:
        assert sorted(map(sorted, one.groups)) == sorted(map(sorted, expected))
        assert all(len({one.layers[key] for key in group}) == 1 for group in one.groups)
    assert {plan(found, "fp8").layers[key] for key in ("embed", "head")} == {""}  # an embedding has no FP8 kernel


def test_errors_are_those_of_the_model_quantized_by_hand(decoder: tuple[nn.Module, Audit]) -> None:
    model, found = decoder
    before = copy.deepcopy(model.state_dict())
    quantized = 0
    for one in found.quantized_plans:
        other = by_hand(model, one.layers)
        assert one.calibration_error == pytest.approx(change(model, other, ids(0)), rel=2e-2)
        worst = max(change(model, other, ids(seed)) for seed in (1, 2))
        assert one.held_out_error == pytest.approx(worst, rel=2e-2)
        assert max(one.calibration_error, worst) <= 0.06 * 1.001
        quantized += any(one.layers.values())
    assert quantized == 4
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_the_mixed_plan_has_the_fewest_bits(decoder: tuple[nn.Module, Audit]) -> None:
    model, found = decoder
    bits = {one.name: one.effective_bits for one in found.quantized_plans}
    assert bits["mixed"] == min(bits.values()) < 8.0
    mixed = plan(found, "mixed").layers
    sizes = {key: model.get_submodule(key).weight.numel() for key in mixed if key != "head"}  # tied: counted once
    each = {"": 16.0, "fp8": 8.0, "int8_weights": 8.0, "nvfp4": 4.5}
    total = sum(each[mixed[key]] * size for key, size in sizes.items()) / sum(sizes.values())
    assert bits["mixed"] == pytest.approx(total)


def test_predictions_are_within_half_again_of_measurements(decoder: tuple[nn.Module, Audit]) -> None:
    other = audited(seeded(Decoder, 1), ids(1), formats="int8,mxfp4", max_error=0.1)
    plans = [one for found in (decoder[1], other) for one in found.quantized_plans if one.single_errors]
    ratios = sorted(one.predicted_error / one.calibration_error for one in plans)
    assert len(ratios) >= 6
    assert all(1 / 1.5 <= ratio <= 1.5 for ratio in ratios), ratios


def test_torchao_runs_the_plan_where_it_has_kernels() -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed", exc_type=ImportError)
    model = seeded(Decoder)
    found = audited(model, ids(0), ids(1), formats="int8,int8_weights,fp8", max_error=0.1)
    assert {one.name: one.verified_by for one in found.quantized_plans if one.name != "mixed"} == {
        "int8": "torchao",
        "int8_weights": "torchao",
        "fp8": "emulation",
    }
    for name in ("int8", "int8_weights"):
        emulated = change(model, by_hand(model, plan(found, name).layers), ids(1))
        assert plan(found, name).held_out_error == pytest.approx(emulated, rel=0.05)
    assert type(model.head.weight) is nn.Parameter


@pytest.mark.parametrize("budget", [0.1, 0.002])
def test_code_for_torchao_keeps_the_limit_as_it_is_pasted(budget: float) -> None:
    """Its default is BF16 for all other layers, unless that exceeds the limit, which the first line says."""
    pytest.importorskip("torchao.quantization", reason="torchao is not installed", exc_type=ImportError)
    model = seeded(Decoder)
    before = copy.deepcopy(model.state_dict())
    found = audited(model, ids(0), ids(1), formats="int8_weights", max_error=budget)
    (one,) = found.quantized_plans
    assert any(one.layers.values())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not model._forward_pre_hooks
    code, other, names = snippet(found, "torchao", "int8_weights"), copy.deepcopy(model), {}
    exec(code, names)
    names["quantize"](other)
    with torch.no_grad():
        pairs = [(model(ids(seed)), other(ids(seed)).float()) for seed in (0, 1)]
    worst = max(float((y - x).norm() / x.norm()) for x, y in pairs)
    assert one.pasted_error is not None
    assert worst <= budget
    assert (one.pasted_error > budget) == (budget == 0.002)
    if one.pasted_error > budget:
        assert code.startswith("# With all other layers in BF16 the error is")
        assert worst == pytest.approx(one.error, rel=5e-3)
    else:
        assert f"with all other layers in BF16: error {worst:.2g}." in " ".join(code.replace("#", "").split())
        assert worst == pytest.approx(one.pasted_error, rel=5e-3)


def test_code_that_needs_a_gpu_says_so() -> None:
    model = seeded(Decoder)
    found = audited(model, ids(0), formats="fp8", max_error=0.2)
    (one,) = found.quantized_plans
    assert one.pasted_error != one.error  # in emulation
    assert one.pasted_error == pytest.approx(one.error, rel=0.2)
    assert "This code needs a GPU, and was not run." in " ".join(
        snippet(found, "torchao", "fp8").replace("#", "").split()
    )


@pytest.mark.parametrize("criteria", ["output: top1 >= 0.9", "output: max_abs <= 1"])
def test_criteria_without_a_gradient_hold_under_a_plan(criteria: str) -> None:
    model = seeded(Decoder)
    found = audited(model, ids(0), ids(1), formats="nvfp4", criteria=criteria)
    (one,) = found.quantized_plans
    assert 4.5 <= one.effective_bits < 16.0
    other = by_hand(model, one.layers)
    with torch.no_grad():
        pairs = [(model(ids(seed)), other(ids(seed))) for seed in (0, 1)]
    if "top1" in criteria:
        assert all(float((x.argmax(-1) == y.argmax(-1)).float().mean()) >= 0.9 for x, y in pairs)
    else:
        assert all(float((x - y).abs().max()) <= 1.001 for x, y in pairs)


@pytest.mark.slow  # a minute
def test_the_users_score_refuses_plans() -> None:
    model, x = seeded(Decoder), ids(5)
    with torch.no_grad():
        reference = model(x)

    @torch.no_grad()
    def closeness(model: nn.Module) -> float:
        return -float((model(x) - reference).norm() / reference.norm())

    asked = {"formats": "nvfp4", "strategies": "cast", "quick": True, "evaluate": closeness, "max_error": 0.5}
    loose, strict = (audit(model, ids(0), **asked, max_drop=drop).quantized_plans[0] for drop in (1.0, 0.02))
    for one in (loose, strict):
        assert one.score.passed
        assert closeness(by_hand(model, one.layers)) == pytest.approx(one.score.value, rel=0.02)
    assert loose.score.value < -0.02 <= strict.score.value < 0
    assert strict.effective_bits > loose.effective_bits


def test_generated_tokens_are_compared_under_the_plan() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=97, initializer_range=0.3, **sizes)
    config.eos_token_id = config.pad_token_id = None
    model = seeded(lambda: transformers.LlamaForCausalLM(config))
    tokens = torch.randint(5, 97, (4, 12), generator=torch.Generator().manual_seed(1))
    found = audit(model, {"input_ids": tokens}, formats="fp8", generate=6, max_error=0.2, strategies="cast", quick=True)
    (one,) = found.quantized_plans
    other, expected = by_hand(model, one.layers), []
    with torch.no_grad():
        for _ in range(6):
            before, after = (x(input_ids=tokens).logits[:, -1].double().log_softmax(-1) for x in (model, other))
            expected.append((before.exp() * (before - after)).sum(-1))
            tokens = torch.cat([tokens, before.argmax(-1, keepdim=True)], 1)
    assert one.generated is not None and one.generated.failure is None
    assert one.generated.kl == pytest.approx(float(torch.stack(expected).mean()), rel=0.02)
    assert "FP8 plan: KL" in text(found, width=200, color=False, most=100)


def relative(reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    return float((outputs[0] - reference[0]).norm() / reference[0].norm())


def test_rows_of_unequal_errors_widen_the_bound_for_unseen_inputs() -> None:
    """In one of 48 rows the error is 1 instead of 0.01, and an unseen row may have twice that."""
    x, change = torch.ones(48, 16), torch.full((48, 16), 0.01)
    even = bound_of([([x], [x + change])], relative)
    assert 0.01 < even < 0.0125  # 4 of 48 rows with twice the error: sqrt(60 / 48)
    change[5] = 1.0
    measured = relative([x], [x + change])
    assert 2 * measured < bound_of([([x], [x + change])], relative) < 5 * measured


def test_too_few_rows_have_no_bound() -> None:
    x = torch.ones(4, 16)
    assert bound_of([([x], [x + 0.01])], relative) == 0.0
    assert bound_of([([x.sum()], [x.sum()])], relative) == 0.0
    assert bound_of([], relative) == 0.0


def test_a_plan_is_refused_if_its_error_comes_from_few_rows() -> None:
    """Rows are passed on in FP32 but for one, so that the error of a set depends on how often it has such a row."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return x + torch.where(x[:, :1] > 0, m.a(x), 0.0)

    model = seeded(lambda: Model(forward, a=nn.Linear(WIDTH, WIDTH)))
    x = normal(48, WIDTH, seed=1)
    x[:, 0] = -1.0
    x[7, 0] = 1.0
    error = change(model, by_hand(model, {"a": "fp8"}), x)
    (tight,) = audited(model, x, formats="fp8", max_error=1.3 * error).quantized_plans
    (loose,) = audited(model, x, formats="fp8", max_error=6 * error).quantized_plans
    assert (tight.layers, loose.layers) == ({"a": ""}, {"a": "fp8"})


def problem(seed: int, cancel: float) -> tuple[list[Group], dict[tuple[int, str], Tensor], float]:
    """Groups with random sizes, changes of the outputs by two schemes, and an error budget. cancel: share of a change that
    is along one direction, with a random sign."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    groups, changes, along = [], {}, torch.nn.functional.normalize(torch.randn(16, generator=generator), dim=0)
    for i in range(7):
        elements = draw.choice([10, 20, 40, 80])
        effect = 0.01 * math.exp(draw.gauss(0, 1))
        effects = {"fp8": effect, "nvfp4": draw.uniform(2, 6) * effect}
        for scheme, size in effects.items():
            other = torch.nn.functional.normalize(torch.randn(16, generator=generator), dim=0)
            changes[i, scheme] = size * (cancel * draw.choice([-1, 1]) * along + (1 - cancel) * other)
        groups.append(Group((str(i),), elements, {scheme: effect**2 for scheme, effect in effects.items()}))
    return groups, changes, 0.03 * math.exp(draw.gauss(0, 0.5))


def searching(groups: list[Group], schemes: tuple[str, ...], measure: Callable[[Choice], ChoiceRun]) -> Search:
    """A search that has measured and accepted only the choice of 16 bits for every group."""
    kept = ("",) * len(groups)
    return Search(groups, schemes, measure, {kept: measure(kept)}, {kept: Verified("emulation", 0.0, 0.0, 0.0)})


def errors_of(choices: Sequence[Choice], changes: dict[tuple[int, str], Tensor], bend: Tensor) -> list[float]:
    """Errors of all choices at once: the formula of `measure` below, in which layers change each other's errors."""
    none = torch.zeros(16)
    # [choices, groups, 16]: the change by each group's option
    used = torch.stack([torch.stack([changes.get((i, s), none) for i, s in enumerate(one)]) for one in choices])
    root = used.norm(dim=-1).sqrt()  # [choices, groups]
    pairs = bend.masked_fill(~torch.ones(7, 7).triu(1).bool()[..., None], 0.0)
    change = used.sum(1) + torch.einsum("ci,cj,ijd->cd", root, root, pairs) / 4
    return change.norm(dim=-1).tolist()


@pytest.mark.parametrize("cancel", [0.0, 0.9])
@pytest.mark.parametrize("seed", thinned(range(8), 4))
def test_the_search_is_as_good_as_trying_all_choices(seed: int, cancel: float) -> None:
    groups, changes, limit = problem(seed, cancel)
    bend = torch.randn(7, 7, 16, generator=torch.Generator().manual_seed(seed)) * 0.1

    def measure(choice: tuple[str, ...]) -> ChoiceRun:
        used = {i: changes[i, s] for i, s in enumerate(choice) if s}
        change = sum(used.values(), torch.zeros(16))
        for i, j in itertools.combinations(used, 2):  # layers in a row change each other's errors
            change = change + bend[i, j] * (used[i].norm() * used[j].norm()).sqrt() / 4
        return ChoiceRun(float(change.norm()), change[None])

    search = searching(groups, ("fp8", "nvfp4"), measure)
    found = search.best(limit)
    assert measure(found).error <= limit
    choices = list(itertools.product(("", "fp8", "nvfp4"), repeat=7))
    errors = errors_of(choices, changes, bend)
    assert errors[choices.index(found)] == pytest.approx(measure(found).error, rel=1e-4)
    fits = [choice for choice, error in zip(choices, errors, strict=True) if error <= limit]
    assert search.bits(found) <= 1.02 * min(map(search.bits, fits))
    assert search.spent <= 14 + 48  # each option by itself, then choices


Measure = Callable[[Choice], ChoiceRun]


def additive(alone: Tensor, elements: Sequence[int]) -> tuple[list[Group], Measure]:
    """Groups of so many elements, each of which FP8 changes by a row, and runs in which these changes add up."""
    groups = [
        Group((str(i),), size, {"fp8": float(one.norm()) ** 2})
        for i, (size, one) in enumerate(zip(elements, alone, strict=True))
    ]

    def measure(choice: tuple[str, ...]) -> ChoiceRun:
        change = torch.tensor([float(bool(scheme)) for scheme in choice]) @ alone
        return ChoiceRun(float(change.norm()), change[None])

    return groups, measure


def test_the_next_choice_is_the_one_whose_error_needs_no_cancellation() -> None:
    alone = torch.tensor([[0.5, 0.0], [-0.5, 0.0], [0.0, 0.2], [0.2, 0.0]])
    groups, measure = additive(alone, [10] * 4)
    cancel, apart = ("fp8", "fp8", "", ""), ("", "", "fp8", "fp8")
    search = searching(groups, ("fp8",), measure)
    search.left = 0
    search.known |= {one: measure(one) for one in (cancel, apart)}
    assert search.known[cancel].error < search.known[apart].error <= 0.3
    assert search.predicted_error(cancel) < search.predicted_error(apart)
    assert search.best(0.3) == cancel
    search.verified[("fp8",) * 4] = Verified("emulation", 0.4, 0.6, 0.6)
    assert search.best(0.3) == apart


def test_if_the_choice_with_the_fewest_bits_is_refused_the_next_one_is_found() -> None:
    groups, measure = additive(torch.diag(torch.tensor([0.022, 0.014, 0.013])), (16, 64, 4))
    search = searching(groups, ("fp8",), measure)
    assert search.best(0.03) == ("fp8",) * 3
    search.verified[("fp8",) * 3] = Verified("emulation", 0.029, 0.031, 0.031)
    assert search.best(0.03) == ("fp8", "fp8", "")


@pytest.mark.parametrize("singles", [256, 2])
def test_changes_that_cancel_are_predicted_to_cancel(singles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.features.quantization.choices.SINGLES", singles)
    groups, measure = additive(torch.tensor([[0.1, 0.0], [-0.1, 0.0], [0.0, 0.1]]), [10] * 3)
    search = searching(groups, ("fp8",), measure)
    assert search.best(0.05) == ("fp8", "fp8", "")
    assert (("", "", "fp8") in search.known) == (singles > 2)  # else its squared effect, 0.01, counts as independent
    assert search.predicted_error(("fp8", "fp8", "")) == 0.0
    assert search.predicted_error(("fp8",) * 3) == pytest.approx(0.1)
    assert search.predicted_error(("fp8", "", "fp8")) == pytest.approx(0.1 * math.sqrt(2))


def test_options_with_negligible_effects_are_not_run_alone() -> None:
    """Of the four smallest squares, 3e-6 together, all but the unknown one are below a hundredth of the squared limit."""
    alone = torch.diag(torch.tensor([0.001, 0.001, 0.001, 0.0, 0.05, 0.06]))
    groups, measure = additive(alone, [10] * 6)
    groups[3] = replace(groups[3], unknown=frozenset({"fp8"}))
    kept = ("",) * 6
    known = {kept: measure(kept)}
    search = Search(groups, ("fp8",), measure, known, {kept: Verified("emulation", 0.0, 0.0, 0.0)}, limit=0.055)
    assert [tuple("fp8" if i == j else "" for j in range(6)) in known for i in range(6)] == [False] * 3 + [True] * 3
    assert search.best(0.055) == ("fp8",) * 5 + ("",)
    assert search.spent <= 6


def test_a_run_that_measured_a_layer_is_not_repeated_by_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run_choice = list[dict[str, str]](), QuantizedPlans.run
    searched = list[QuantizedPlans]()

    def keep(plans: QuantizedPlans, schemes: dict[str, str], *others: Any) -> ChoiceRun:
        searched.append(plans)
        ran.append({key: scheme for key, scheme in schemes.items() if scheme})
        return run_choice(plans, schemes, *others)

    monkeypatch.setattr(QuantizedPlans, "run", keep)
    model, x = seeded(twins), normal(32, WIDTH, seed=1)
    errors = {name: change(model, by_hand(model, {name: "fp8"}), x) for name in "ab"}
    (one,) = audited(model, x, formats="fp8", max_error=1.1 * max(errors.values()) / MARGIN).quantized_plans
    assert sorted(one.layers.values()) == ["", "fp8"]
    assert ran[0] == {}
    alone = [("fp8", ""), ("", "fp8")]
    assert not [schemes for schemes in ran if len(schemes) == 1]
    known = {group.keys[0]: searched[0].known[choice] for group, choice in zip(searched[0].groups, alone, strict=True)}
    assert {name: run.error for name, run in known.items()} == pytest.approx(errors, rel=1e-3)


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_a_scheme_whose_run_fails_is_not_chosen(error: float) -> None:
    def measure(choice: tuple[str, ...]) -> ChoiceRun:
        change = 0.1 * bool(choice[0])
        return ChoiceRun(error, torch.zeros(0)) if choice[1] else ChoiceRun(change, torch.tensor([[change]]))

    groups = [Group((str(i),), 10, {"fp8": 0.01}) for i in range(2)]
    search = searching(groups, ("fp8",), measure)
    assert search.best(0.2) == ("fp8", "")
    assert search.predicted_error(("fp8", "fp8")) > 1e9


@pytest.mark.parametrize("criterion", ["", "output: kl <= 0.01", "output: rel_l2 <= 0.1", "output: max_abs <= 0.5"])
@pytest.mark.parametrize("length", [64, 3000])
def test_the_norm_of_a_change_is_the_error_and_changes_add_up(criterion: str, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    reference, *moved = torch.randn(5, 4, length, generator=generator)
    by = OutputMetric(0.1)
    if criterion:
        by = OutputMetric(1.0, Criteria(validate(Settings, {"criteria": criterion}).criteria, 0.1, ("output",)))
    small = [reference + 1e-4 * x for x in moved]
    changes = [change_of([reference], [x], by) for x in small]
    for x, found in zip(small, changes, strict=True):
        assert float(found.norm()) == pytest.approx(by.distance([reference], [x]), rel=1e-3)
    both, spread = change_of([reference], [small[0] + small[1] - reference], by), 4 * math.sqrt(2 / 4096)
    if "max_abs" not in criterion:  # its norm is no root of a sum of squares
        assert float((changes[0] + changes[1]).norm()) == pytest.approx(float(both.norm()), rel=spread)


def test_a_device_without_the_products_gains_only_bytes() -> None:
    product, reading = Cost(10**12, 2 * 10**6, False), Cost(10, 2 * 10**8, False)
    fp8, nvfp4 = SCHEMES["fp8"], SCHEMES["nvfp4"]
    assert quantized_seconds(product, 10**6, fp8, "H100") == pytest.approx(10**12 / 1979e12)
    assert quantized_seconds(product, 10**6, fp8, "A100") == pytest.approx(10**12 / 312e12)
    assert quantized_seconds(product, 10**6, nvfp4, "B200") == pytest.approx(10**12 / 9000e12)
    # 10^8 weights of 4.5 bits and 10^8 activations of 16 bits at 2039 GB/s
    assert quantized_seconds(reading, 10**8, nvfp4, "A100") == pytest.approx(10**8 * (4.5 / 8 + 2) / 2039e9)


@pytest.mark.parametrize(
    ("model", "x", "scheme", "why"),
    [
        (nn.Sequential(nn.Linear(48, 48)), torch.randn(4, 48), "int4", r"not multiples of 1x128 \(outputs x inputs\)"),
        (
            nn.Sequential(nn.Linear(48, 100)),
            torch.randn(4, 48),
            "nvfp4",
            r"not multiples of 16x16 \(outputs x inputs\)",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3)),
            torch.randn(1, 3, 8, 8),
            "int4",
            "`int4`: no kernel supports the convolutions",
        ),
        (nn.Sequential(nn.GELU()), torch.randn(4, 48), "int4", "no linear layer, convolution or embedding"),
        (nn.Embedding(8, 16), torch.tensor([[1, 2]]), "fp8", "`fp8`: no kernel supports the embeddings"),
    ],
    ids=["widths", "rows", "convolutions", "no layer", "no kernel"],
)
def test_a_scheme_without_a_layer_is_an_error(model: nn.Module, x: Tensor, scheme: str, why: str) -> None:
    with refused(PlanError, "no-layer", match=why):
        audit(model.eval(), x, formats=scheme)


def test_reports_and_files_show_the_plans(decoder: tuple[nn.Module, Audit], tmp_path: Path) -> None:
    _, found = decoder
    one, shown = quantized_plan(found), text(found, width=200, color=False)
    assert f"layers quantized, with {one.model_bits:.2f} bits per weight" in shown
    assert shown.count("\n") <= 40
    page = html(found)
    assert "mixed plan" in page and "Sum of single" in page
    found.save(tmp_path)
    assert load(tmp_path).quantized_plans[0].layers == found.quantized_plans[0].layers


def cancelling() -> nn.Module:
    """The difference of two equal layers, and a third layer."""
    layers = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in "abc"}
    layers["b"].weight.data.copy_(layers["a"].weight.data)
    return Model(lambda m, x: m.a(x) - m.b(x) + 0.1 * m.c(x), **layers)


def routed() -> nn.Module:
    """One of two layers for each row, by the larger score."""
    layers = {"router": nn.Linear(WIDTH, 2, bias=False), "a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}
    return Model(lambda m, x: torch.where(m.router(x).argmax(-1, keepdim=True) == 0, m.a(x), m.b(x)), **layers)


@pytest.mark.parametrize("make", thinned([twins, cancelling, routed, halves], 2))
@pytest.mark.parametrize("budget", [0.01, 0.1])
def test_no_plan_quantizes_an_unsafe_layer_without_a_reason(make: Callable[[], nn.Module], budget: float) -> None:
    x = normal(64, 2 * WIDTH if make is halves else WIDTH, seed=1)
    found = audited(seeded(make), x, formats="fp8,int8", max_error=budget)
    doubtful = {(one.key, one.scheme) for one in found.quantization if one.verdict.verdict in ("unsafe", "untested")}
    for one in found.quantized_plans:
        assert set(one.despite) == {key for key, scheme in one.layers.items() if (key, scheme) in doubtful}
        assert all("the error is" in why for why in one.despite.values())
        for layer in found.quantization:
            if layer.remedy and one.layers[layer.key] == layer.scheme:
                assert "not needed in the " in _remedy(layer, found)


def test_layers_whose_errors_cancel_are_quantized_with_the_reason() -> None:
    found = audited(seeded(cancelling), normal(64, WIDTH, seed=1), formats="fp8", max_error=0.1)
    verdicts = {one.key: one.verdict.verdict for one in found.quantization}
    assert (verdicts["a"], verdicts["b"]) == ("unsafe", "unsafe")
    (one,) = found.quantized_plans
    assert set(one.layers.values()) == {"fp8"}
    assert set(one.despite) == {"a", "b"}
    shown = " ".join(text(found, width=200, color=False, most=100).split())
    assert "Unsafe alone, yet within the limit in this plan: a, b." in shown, shown


def test_of_equal_bits_and_times_the_mixed_plan_has_the_smallest_error() -> None:
    """INT8 is more accurate than FP8 for values of one magnitude, and less for a row with one large value."""
    model, x = seeded(twins), normal(64, WIDTH, seed=1)
    alone = {(name, s): change(model, by_hand(model, {name: s}), x) for name in "ab" for s in ("fp8", "int8")}
    found = audited(model, x, formats="fp8,int8", max_error=0.2)
    mixed = plan(found, "mixed")
    assert mixed.layers == {name: min(("fp8", "int8"), key=lambda s: alone[name, s]) for name in "ab"}
    assert mixed.error == pytest.approx(change(model, by_hand(model, mixed.layers), x), rel=1e-3)
    for one in found.quantized_plans:
        equal = one.effective_bits == mixed.effective_bits and one.time_share == mixed.time_share
        assert not equal or mixed.error <= one.error


def test_a_mixed_plan_exchanges_schemes_of_equal_bits_for_more_accurate_ones() -> None:
    groups = [Group((str(i),), 10, {"fp8": 0.01, "int8": 0.01}) for i in range(2)]

    def measure(choice: Choice) -> ChoiceRun:
        worse = ("fp8", "int8")  # the less accurate scheme of each group
        change = torch.tensor([[0.15 if s == bad else 0.05 * bool(s) for s, bad in zip(choice, worse, strict=True)]])
        return ChoiceRun(float(change.norm()), change)

    search = searching(groups, ("fp8", "int8"), measure)
    assert search.more_accurate(("fp8", "fp8")) == ("int8", "fp8")
    assert search.more_accurate(("int8", "fp8")) == ("int8", "fp8")
    search.seconds = lambda choice: float(choice.count("int8"))
    assert search.more_accurate(("fp8", "fp8")) == ("fp8", "fp8")


def test_no_dominated_plan_is_listed_and_the_best_plan_is_the_first() -> None:
    x = normal(64, 2 * WIDTH, seed=1)
    found = audited(seeded(halves), x, formats="fp8,int8,nvfp4", max_error=0.05)
    shown = " ".join(text(found, width=200, color=False, most=100).split())
    best = min(found.quantized_plans, key=lambda one: (one.effective_bits, one.time_share or 0.0, one.error))
    assert shown.partition("Quantized ")[2].startswith("mixed plan" if best.name == "mixed" else best.name.upper())
    assert quantized_plan(found).name == best.name
    for one in found.quantized_plans:
        better = [
            other
            for other in found.quantized_plans
            if any(other.layers.values())
            and other.effective_bits <= one.effective_bits
            and (other.time_share or 0.0) <= (one.time_share or 0.0)
            and other.weights_bytes <= one.weights_bytes
            and other.error < one.error
        ]
        title = "mixed plan" if one.name == "mixed" else f"{one.name.upper()} plan"
        assert not better or not any(one.layers.values()) or one.dominated_by
        assert (f"{title}: " in shown) == (not one.dominated_by)


def test_only_choices_that_ran_are_called_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(32, 2 * WIDTH, seed=1)
    strict = audited(seeded(halves), x, formats="fp8", max_error=1e-5)
    shown = " ".join(text(strict, width=200, color=False, most=100).split())
    tested = strict.quantized_plans[0].tested
    assert tested >= 2
    assert f"since none of the {tested} tested choices of layers is within 80% of the error budget" in shown
    monkeypatch.setattr(
        QuantizedPlans,
        "run",
        lambda self, schemes, batches, by="emulation": ChoiceRun(
            math.inf if any(schemes.values()) else 0.0, torch.zeros(1, 4096)
        ),
    )
    monkeypatch.setattr(QuantizedPlans, "runs_of_layers", lambda self: {})  # those that measured layers fail too
    failed = audited(seeded(halves), x, formats="fp8", max_error=0.1)
    shown = " ".join(text(failed, width=200, color=False, most=100).split())
    assert failed.quantized_plans[0].tested == 0
    assert "no layer is quantized, since no run with a quantized layer gave finite outputs" in shown
