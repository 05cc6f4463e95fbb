"""Advice on training where its measurement asks for it, its section in the report, and its loop, run as it is written."""

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.features.training.advice import advice_of
from auditor.features.training.objective import training_subject
from auditor.features.training.recommend import loss_scale
from auditor.features.training.report import loop_code
from auditor.numerics.histogram import magnitudes_of
from auditor.records.audit import Audit
from auditor.records.training import Training
from auditor.reporters import html, markdown, text
from auditor.snippets.trainers import training_code
from auditor.training.step import StepPrecision, capture_step
from tests.features.training.conftest import Trained, audited, fp32_gradients, loss_fn, made
from tests.support.replaying import Model, linear
from tests.support.subjects import normal, seeded
from tests.unit.report.factory import HOSTILE

BATCH = normal(4, 8), normal(4, 8, seed=1)


def test_some_advice_is_given_where_it_is_true_alone(trained: Trained) -> None:
    """Master weights by the share of lost updates; clipping and reducing of FP16."""
    training = trained.audit.training
    model, *batch = made()
    capture = capture_step(training_subject(model, tuple(batch), {}, loss_fn), ("fp16", "bf16"))

    steps = {fmt: StepPrecision(fmt) for fmt in ("fp16", "bf16")}

    def codes(**changes: Any) -> set[str]:
        return {advice.code for advice in advice_of(replace(training, **changes), capture, steps)}

    for share in (0.05, 0.2):
        outlook = replace(training.bf16, lost_adam={**training.bf16.lost_adam, 1e-3: share})
        assert ("master-weights" in codes(bf16=outlook)) is (share > 0.1)
    assert "master-weights" not in codes(bf16=None)
    assert {"clip-after-unscale", "reduce-dtype"} <= codes(format="fp16")
    assert "clip-after-unscale" not in codes(format="bf16")
    assert "reduce-dtype" not in codes(fp16=None)


# The training section: rendered from a real audit, from an empty window, and with names that try to break out.


def with_training(trained: Trained, **changes: object) -> Audit:
    return replace(trained.audit, training=replace(trained.audit.training, **changes))


def test_the_section_holds_window_advice_and_loop(trained: Trained) -> None:
    training = trained.audit.training
    page = html(trained.audit)
    section = page.partition('<section id="training">')[2].partition("</section>")[0]
    assert "Gradients against the range of FP16" in section
    assert f"{training.fp16.maximum:,.10g}" in section
    assert all(advice.title.replace("'", "&#39;") in section for advice in training.advice)
    assert "loss_fn(model(inputs).float(), targets)" in section
    assert '<a href="#training">' in page
    assert training.recommendation.split(":")[0] in " ".join(text(trained.audit, width=200).split())
    assert "**Training**: " in markdown(trained.audit)


def test_the_section_is_open_and_the_lines_stand_below_the_code(trained: Trained) -> None:
    assert '<section id="training">\n  <h2>Training</h2>\n' in html(trained.audit)
    page = markdown(trained.audit)
    assert 0 < page.index("**To do**") < page.index("**Use it**") < page.index("**Training**")


def test_advice_that_a_short_terminal_omits_is_counted(trained: Trained) -> None:
    advice = tuple(replace(trained.audit.training.advice[0], title=f"Advice {number}") for number in range(4))
    page = text(with_training(trained, advice=advice), width=100, most=1)
    assert re.search(r"\d more recommendations?, in report.html", " ".join(page.split()))


def test_hostile_names_add_no_markup(trained: Trained) -> None:
    training = trained.audit.training
    modules = tuple(replace(m, module=HOSTILE) for m in training.modules)
    nodes = tuple(replace(n, owner=HOSTILE, source=HOSTILE) for n in training.nodes)
    page = html(with_training(trained, modules=modules, nodes=nodes, loss_source=HOSTILE))
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page


# The loop that the report offers to copy, run as it is written.


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs an audit's loop beside its files, on names of the caller's: all that is trained changes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(audit: Audit, model: nn.Module, **names: Any) -> None:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        audit.save(tmp_path)
        sys.modules.pop("patched_model", None)
        exec(compile(loop_code(audit) or "", "loop.py", "exec"), {"model": model, **names})
        del sys.modules["patched_model"]
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, old) is not parameter.requires_grad

    return run


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_the_loop_trains_in_the_steps_of_the_snippet(trained: Trained, fmt: str, train: Callable[..., None]) -> None:
    audit = replace(trained.audit, training=replace(trained.audit.training, format=fmt))
    code = loop_code(audit)
    assert code.startswith(training_code(audit, fmt, f"autocast_{fmt}"))
    assert "put no torch.autocast" in " ".join(code.replace("#", " ").split())
    assert "with torch.autocast" not in code
    model, tokens, targets = made()
    train(audit, model, loader=[(tokens, targets)] * 3, loss_fn=loss_fn)


@dataclass(frozen=True)
class Both:
    y: Tensor
    more: tuple[Tensor, ...]
    name: str = "both"


class Pair(nn.Module):
    """Answers in every way that a loss can be handed on, or be the answer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(8, 8), way

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.layer(x)
        if self.way == "tensors":
            return {"y": y, "more": (y.tanh(),)}
        if self.way == "dataclass":
            return Both(y, (y.tanh(),))
        loss = nn.functional.mse_loss(y.float(), labels)
        return {"loss": loss} if self.way == "mapping" else SimpleNamespace(loss=loss)


def test_the_loop_hands_a_model_its_several_inputs(train: Callable[..., None]) -> None:
    model = Model(lambda m, a, b: m.layer(a + b), layer=linear(8, 8))
    a, b, y = normal(3, 4, 8)
    found, training = audited(model, (a, b, y), nn.functional.mse_loss, strategies="autocast", formats="bf16")
    assert training.inputs == "tuple"
    train(found, model, loader=[((a, b), y)] * 2, loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("way", "form"),
    [
        ("tensors", "tensor"),
        ("dataclass", "tensor"),
        ("mapping", "dict"),
        *(("attribute", form) for form in ("tuple", "dict", "both")),
    ],
)
def test_the_loop_runs_whatever_the_model_takes_and_returns(way: str, form: str, train: Callable[..., None]) -> None:
    """Where the model computes its own loss, it is called as the audit did."""

    def squares(outputs: Any, targets: Tensor) -> Tensor:
        y, more = (outputs.y, outputs.more) if way == "dataclass" else (outputs["y"], outputs["more"])
        assert y.dtype is more[0].dtype is torch.float32
        return (y - targets + more[0]).square().mean()

    model, (x, y) = seeded(lambda: Pair(way)), BATCH
    own = way not in ("tensors", "dataclass")
    batch: Any = {"dict": {"x": x, "labels": y}, "both": ((x,), {"labels": y})}.get(form, (x, y))
    found, training = audited(model, batch, None if own else squares, strategies="autocast", formats="bf16")
    assert found.to_dict()  # what the file has of it
    assert (training.inputs, training.returned) == (form, "tensors" if way == "dataclass" else way)
    train(found, model, loader=[batch] * 2, loss_fn=squares)


def test_without_a_plan_the_loop_has_the_region_that_was_measured() -> None:
    found, _ = audited(linear(8, 8), BATCH, nn.functional.mse_loss, strategies=("cast",))
    code = loop_code(found)
    assert "    with torch.autocast(DEVICE, dtype=torch." in code
    assert "patched_model" not in code


# Numbers of the advice on training, held against autograd and against steps of its own.


def advice(training: Training, code: str) -> str:
    return next(a.text for a in training.advice if a.code == code)


def test_numbers_of_advice_are_those_of_autograd(trained: Trained) -> None:
    model = copy.deepcopy(trained.before)
    model.dropout.p = 0.0
    _, found = audited(model, trained.batch, loss_fn)
    gradients = fp32_gradients(model, trained.batch, loss_fn)
    whole = torch.cat([g.flatten() for g in gradients.values()])
    norm = float(whole.norm())
    clip = advice(found, "clip-after-unscale")
    assert f"The gradient norm is {norm:.3g}; before" in clip
    assert f"it is {norm * found.fp16.init:,.6g}" in clip
    ranks = re.search(r"(\d+) ranks with this value add up to more than FP16's", advice(found, "reduce-dtype"))
    largest = float(whole.abs().max()) * found.fp16.init
    assert largest * (int(ranks[1]) - 1) <= 65504 < largest * int(ranks[1])
    eps = re.search(r"In FP16, (\S+)% of these values become zero", advice(found, "adam-eps"))
    nonzero = whole[whole != 0]
    # a histogram has powers of two
    assert float(eps[1]) == pytest.approx(100 * float(((1e-3 * nonzero.square()).half() == 0).float().mean()), abs=3)


def test_an_embedding_makes_the_share_that_is_said() -> None:
    def looked_up(m: Any, tokens: Tensor) -> Tensor:
        x = m.embed(tokens)
        return m.head(x.detach() + 50 * (x - x.detach()))

    torch.manual_seed(0)
    model = Model(looked_up, embed=nn.Embedding(8, 8), head=nn.Linear(8, 8))
    batch = (torch.randint(0, 8, (4, 6)), torch.randn(4, 6, 8))
    _, training = audited(model, batch, nn.functional.mse_loss, strategies=("autocast",))
    gradients = {n: float(g.square().sum()) for n, g in fp32_gradients(model, batch, nn.functional.mse_loss).items()}
    share = gradients["embed.weight"] / sum(gradients.values())
    assert advice(training, "embedding-dominates").startswith(
        f"It contributes {share:.0%} of the squared gradient norm."
    )


def test_a_backward_pass_that_overflows_is_said_with_how_many_gradients() -> None:
    """roots of what FP16 flushes to zero: their slope is infinite there, and 1e5 at most in FP32."""

    def roots() -> nn.Module:
        return Model(lambda m, x: (x.abs() * m.scale).sqrt(), scale=nn.Parameter(torch.tensor([1e-9, 1.0, 1.0, 2.0])))

    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    _, training = audited(roots(), (x,), lambda y: y.mean(), formats=("fp16",))
    low = (x * roots().scale.detach()).half().requires_grad_()
    low.sqrt().backward(torch.full_like(low, 1 / x.numel()))
    broken = int(low.grad.isinf().sum())
    assert broken == 6
    (said,) = (node.reasons["fp16"] for node in training.nodes if node.reasons)
    assert said == (
        f"the backward pass in FP16 turns {broken} finite gradient values into Inf or NaN; the gradient of scale then "
        "contains Inf or NaN too"
    )
    assert advice(training, "backward-fails").endswith("too. Autocast does so.")  # nothing here is FP16 under autocast
    rounded = (x * roots().scale.detach()).half().float()
    scale = torch.ones(4, requires_grad=True)
    (rounded * scale).sqrt().mean().backward()
    assert scale.grad is not None and not scale.grad.isfinite().all()


@pytest.mark.parametrize(("strategy", "ends"), [("autocast", "too. The plan autocast_fp16 does so."), ("cast", "too.")])
def test_advice_on_a_backward_pass_says_whether_the_plan_follows_it(strategy: str, ends: str) -> None:
    """The squares of a linear layer's FP16 results are FP16 under autocast, and zero: the root's slope is infinite."""

    def tiny() -> nn.Module:
        first = nn.Linear(4, 4, bias=False)
        nn.init.constant_(first.weight, 1e-5)
        return Model(lambda m, x: (m.first(x) * m.first(x)).sqrt(), first=first)

    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    _, training = audited(tiny(), (x,), lambda y: y.mean(), formats=("fp16",), strategies=strategy)
    said = advice(training, "backward-fails")
    assert said.startswith("At sqrt.default (test_advice.py:") and said.endswith(ends)
    assert (training.errors["fp16"] < 0.1) is (strategy == "autocast")


def test_what_has_no_gradient_yet_is_said() -> None:
    """An adapter begins at zero, as LoRA does: nothing reaches `a` in the first step."""
    base, a, b = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    nn.init.zeros_(b.weight)
    adapter = Model(lambda m, x: m.base(x) + m.b(m.a(x)), base=base, a=a, b=b)
    _, training = audited(adapter, BATCH, nn.functional.mse_loss, strategies=("autocast",))
    assert advice(training, "zero-gradients").startswith(
        "The gradient of these parameters is zero in this step: a.weight. "
    )


@pytest.mark.usefixtures("process_group")
def test_a_sum_over_ranks_is_said_where_it_stands() -> None:
    """It stays in the dtype that it is given: what two ranks hold would be added in FP16."""
    from torch import distributed
    from torch.distributed import _functional_collectives as collectives

    def gathered(m: Any, x: Tensor) -> Tensor:
        return collectives.all_reduce(m.layer(x), "sum", distributed.group.WORLD) * 1.0

    half = collectives.all_reduce(torch.ones(3, dtype=torch.float16), "sum", distributed.group.WORLD)
    assert half.dtype is torch.float16
    _, training = audited(
        Model(gathered, layer=linear(8, 8)), BATCH, nn.functional.mse_loss, strategies="autocast", formats="bf16"
    )
    said = advice(training, "low-collective")
    assert re.match(rf"\S*all_reduce\S* at {Path(__file__).name}:\d+ adds the values of all ranks in ", said), said


def test_a_layer_far_above_the_others_is_said_with_its_factor() -> None:
    def steep(m: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(m.layers):
            y = layer(x if i != 2 else x.detach())
            x = x + (y if i != 2 else y.detach() + 300 * (y - y.detach()))
        return x

    model = seeded(lambda: Model(steep, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(5))))
    _, training = audited(model, BATCH, nn.functional.mse_loss, strategies=("autocast",))
    squares: dict[str, float] = {}
    for name, g in fp32_gradients(model, BATCH, nn.functional.mse_loss).items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + float(g.square().sum())
    norms = {module: value**0.5 for module, value in squares.items()}
    middle = sorted(norms.values())[2]
    said = advice(training, "gradient-outliers")
    assert said.startswith(
        f"The median gradient norm of a module is {middle:.2g}. "
        f"Far larger norms: layers.2 ({norms['layers.2'] / middle:.0f} times)"
    )


def test_an_empty_window_is_said(trained: Trained) -> None:
    far = torch.cat((torch.full((100,), 2.0**3), torch.full((100,), 2.0**-40)))
    audit = with_training(trained, fp16=loss_scale({"up": magnitudes_of(far)}), format="bf16")
    section = html(audit).partition('<section id="training">')[2].partition("</section>")[0]
    assert "No loss scale is usable" in section


def test_nothing_low_is_said(trained: Trained) -> None:
    training = trained.audit.training
    audit = with_training(
        trained,
        fp16=None,
        bf16=None,
        format=None,
        nodes=(),
        advice=(),
        modules=tuple(replace(m, low=None) for m in training.modules),
        parameters=tuple(replace(p, low=False) for p in training.parameters),
    )
    section = html(audit).partition('<section id="training">')[2].partition("</section>")[0]
    assert "No gradient is in low precision" in section
    assert "The measurements show no problem" in section
    assert loop_code(audit) is None
