"""Decisions inside a model: planted shares of the error, worked out here by hand, and what flips."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.measure.decisions import measure_decisions
from auditor.measure.rerun import PLAIN
from auditor.records.decisions import Decisions
from auditor.report.origins import decision_words
from auditor.report.view import ReportView
from auditor.report.words import percent, ratio
from auditor.reporters import html, text
from tests.support.replaying import Model, linear
from tests.support.subjects import measurement_of, normal, seeded

ROWS, WIDTH, EXPERTS = 4096, 32, 16
X = normal(ROWS, WIDTH, seed=5)


def low(x: Tensor) -> Tensor:
    """Rounded to BF16."""
    return x.bfloat16().float()


def bf16_of(model: nn.Module, *inputs: Tensor) -> Decisions | None:
    (found,) = [d for d in measure_decisions(measurement_of(model, *inputs), PLAIN) if d.format == "bf16"] or [None]
    return found


def share(reference: Tensor, free: Tensor, frozen: Tensor) -> tuple[float, float, float]:
    """Error of everything low, the same with decisions held, and the share of the square that is the decisions'."""
    error, rest = (float((x - reference).norm() / reference.norm()) for x in (free, frozen))
    return error, rest, 1 - (rest / error) ** 2


class Codes(nn.Module):
    """A table's row for the largest score, beside a layer: by their sizes, either makes most of the error."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.scores, self.layer = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(size * normal(EXPERTS, WIDTH, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x), self.table[self.scores(x).argmax(-1)]], -1)

    def by_hand(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def out(x: Tensor, choice: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
            layer = of(x @ of(self.layer.weight).T + of(self.layer.bias))
            return torch.cat([layer, of(self.table)[choice]], -1)

        def choice(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
            return of(x @ of(self.scores.weight).T + of(self.scores.bias)).argmax(-1)

        ours = choice(x, lambda x: x)
        return out(x, ours, lambda x: x), out(low(x), choice(low(x), low), low), out(low(x), ours, low)


class Gate(nn.Module):
    """What lies above a threshold passes, and is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.where(h > 0.5, h, 0.25 * h)

    def by_hand(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        exact = x @ self.layer.weight.T + self.layer.bias
        rounded = low(low(x) @ low(self.layer.weight).T + low(self.layer.bias))
        above = exact > 0.5
        return tuple(
            torch.where(mask, h, low(0.25 * h) if h is rounded else 0.25 * h)
            for h, mask in ((exact, above), (rounded, rounded > 0.5), (rounded, above))
        )


class Experts(nn.Module):
    """A mixture: the two experts of the largest scores, weighed by their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(normal(EXPERTS, WIDTH, WIDTH, seed=2) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).topk(2, -1)
        each = torch.einsum("nd,edf->nef", x, self.experts)
        taken = each.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return (taken * best.softmax(-1)[..., None]).sum(1)

    def by_hand(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def out(x: Tensor, of: Callable[[Tensor], Tensor], held: Tensor | None = None) -> tuple[Tensor, Tensor]:
            scored = of(x @ of(self.router.weight).T)
            chosen = scored.topk(2, -1).indices if held is None else held
            weights = of(scored.gather(1, chosen).softmax(-1))
            rows = torch.arange(len(x))
            taken = [of((x[:, None] @ of(self.experts)[chosen[rows, i]])[:, 0]) for i in range(2)]
            return of(sum(of(one * weights[:, i, None]) for i, one in enumerate(taken))), chosen

        reference, ours = out(x, lambda x: x)
        return reference, out(low(x), low)[0], out(low(x), low, ours)[0]


@pytest.mark.parametrize(
    ("make", "planted"),
    [(lambda: Codes(0.053), 0.9), (lambda: Codes(0.0176), 0.5), (Gate, None), (Experts, None)],
    ids=["90 %", "50 %", "threshold", "experts"],
)
def test_the_error_is_taken_apart_as_by_hand(make: Callable[[], nn.Module], planted: float | None) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        error, frozen, decided = share(*model.by_hand(X))
    found = bf16_of(model, X)
    print(error, frozen, decided, found)
    assert planted is None or decided == pytest.approx(planted, abs=0.03)
    assert found.error == pytest.approx(error, rel=0.02)
    assert found.frozen == pytest.approx(frozen, rel=0.02)
    assert found.share == pytest.approx(decided, abs=0.03)


def plain(m: Any, x: Tensor) -> Tensor:
    """Nothing is decided: a rectifier and a clamp are continuous, and a largest value is read without its place."""
    h = torch.relu(m.layer(x)).clamp(max=2)
    return h - h.max(-1, keepdim=True).values


def masked(m: Any, x: Tensor) -> Tensor:
    """What is decided depends on the inputs alone, which the format holds: no decision moves."""
    return m.layer(x) * (x.round() > 0.5)


@pytest.mark.parametrize("forward", [plain, masked])
def test_where_nothing_is_decided_nothing_is_said(forward: Callable[..., Tensor]) -> None:
    model = Model(forward, layer=linear(WIDTH, WIDTH))
    assert measure_decisions(measurement_of(model, X[:64].round()), PLAIN) == ()


def test_an_audit_of_a_model_that_decides_nothing_shows_no_section() -> None:
    audit = auditor.audit(Model(plain, layer=nn.Linear(WIDTH, WIDTH)), X[:8], quick=True, formats="bf16")
    assert audit.decisions == ()
    assert not decision_words(audit)
    assert 'id="decisions"' not in html(audit)


def several(m: Any, x: Tensor) -> Tensor:
    """Four choices of one row: the costly one is that of `second`; the last is read by nobody."""
    one = m.table[m.first(x).sort(-1, descending=True)[1][:, 0]]
    other = m.table[m.second(x).argmin(-1)]
    hot = nn.functional.one_hot(m.third(x).argmax(-1), EXPERTS) @ m.table.detach().long()
    return torch.cat([x, 0.01 * one, other, hot], -1)


def test_the_costly_operation_is_named_and_its_scores_in_fp32_remove_its_flips() -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(WIDTH, EXPERTS) for name in ("first", "second", "third")}
    found = bf16_of(Model(several, **layers, table=nn.Parameter(normal(EXPERTS, WIDTH, seed=1))), X)
    first, *rest = found.operations
    assert (first.op, first.owner) == ("aten.argmin.default", "")
    assert first.source.startswith("test_decisions.py:")
    assert {one.op for one in rest} >= {"aten.sort.default", "aten.argmax.default"}
    assert all(one.error <= first.error for one in rest)
    assert found.lifted == "second"
    assert (found.lifted_seen, first.seen > 0) == (0.0, True)
    assert found.frozen < found.lifted_error < found.error


def test_the_choice_that_makes_most_others_flip_is_named() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        signs = m.signs[m.scores(x).argmax(-1)].view(64, 64)
        return torch.cat([signs, *((signs.cumprod(-1) * size > 0) * 1.0 for size in range(1, 12))])

    torch.manual_seed(0)
    signs = torch.tensor([1.0, -1.0]).repeat(EXPERTS // 2)
    found = bf16_of(Model(forward, scores=nn.Linear(WIDTH, EXPERTS), signs=signs), X)
    first, *rest = found.operations
    assert (first.op, found.lifted, found.frozen) == ("aten.argmax.default", "scores", 0.0)
    assert 0 < first.error < found.error
    assert [(one.op, one.own) for one in rest] == [("aten.gt.Scalar", 0.0)] * 11
    assert all(one.seen > first.seen for one in rest)


@pytest.mark.parametrize(
    ("choose", "taken"),
    [
        (lambda x: x.argsort(1, descending=True)[:, :3], 3),
        (lambda x: x.argsort(-1, descending=True)[:, :3], 3),
        (lambda x: x.sort(-1, descending=True)[1][..., :3], 3),
        (lambda x: x.argsort(-1, descending=True)[:, : 3 - EXPERTS], 3),
        (lambda x: x.argsort(-1, descending=True)[:, ::2], None),
        (lambda x: x.argsort(-1, descending=True)[:, -3:], None),
    ],
    ids=["dimension", "from the end", "sort", "negative end", "steps", "last"],
)
def test_the_first_entries_of_a_sorted_row_are_a_top_k(choose: Callable[[Tensor], Tensor], taken: int | None) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.table[choose(m.scores(x))].sum(1)

    torch.manual_seed(0)
    found = bf16_of(Model(forward, scores=nn.Linear(WIDTH, EXPERTS), table=normal(EXPERTS, WIDTH, seed=1)), X)
    (one,) = found.operations
    assert (one.count, one.predicted is None) == (ROWS * (taken or EXPERTS), taken is None)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.argmax(-1),
        lambda x: x.argmin(-1),
        lambda x: x.max(-1)[1],
        lambda x: x.sort(-1, descending=True)[1][:, 0],
        lambda x: x.topk(1)[1][:, 0],
    ],
    ids=["argmax", "argmin", "max", "sort", "topk"],
)
def test_flips_are_counted_as_the_operation_breaks_ties(choose: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    scores = nn.Linear(WIDTH, EXPERTS)
    table = normal(EXPERTS, WIDTH, seed=1)
    found = bf16_of(Model(lambda m, x: m.table[choose(m.scores(x))], scores=scores, table=table), X)
    rounded = low(low(X) @ low(scores.weight).T + low(scores.bias)).bfloat16()
    assert found.operations[0].seen == pytest.approx(float((choose(scores(X)) != choose(rounded)).double().mean()))


def loop(m: Any, x: Tensor, held: Tensor | None = None) -> Tensor:
    """A mixture of experts as it is mostly written: which rows an expert gets sets a shape, and the recording holds it."""
    best, chosen = m.router(x).topk(2, -1)
    chosen = chosen if held is None else held
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == index)
        y = y.index_add(0, rows, expert(x[rows]) * best.sigmoid()[rows, place, None])
    return y


def test_choices_that_set_shapes_are_told_apart_by_the_model_s_own_run() -> None:
    torch.manual_seed(0)
    router, experts = nn.Linear(WIDTH, 8, bias=False), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
    model, x = Model(loop, router=router, experts=experts).eval(), X[:1024]
    audit = auditor.audit(model, x, quick=True, formats="bf16", strategies="cast")
    (found,) = audit.decisions
    assert [one.op for one in found.operations] == ["aten.where.default"]
    with torch.no_grad():
        reference, ours, half = model(x), model.router(x).topk(2, -1)[1], copy.deepcopy(model).bfloat16()
        free, frozen = (half(x.bfloat16(), held).float() for held in (None, ours))
    error, rest, decided = share(reference, free, frozen)
    assert (found.error, found.frozen) == pytest.approx((error, rest), rel=0.05)
    assert decided > 0.9
    assert found.share == pytest.approx(decided, abs=0.03)


def test_report_and_terminal_state_both_parts_and_the_operation_with_its_line() -> None:
    audit = auditor.audit(seeded(lambda: Codes(0.0176)), X[:1024], quick=True, formats="bf16")
    (found,) = audit.decisions
    said = decision_words(audit)
    for part in (ratio(found.error), ratio(found.frozen), percent(found.share), "argmax", found.operations[0].source):
        assert part in said
    assert said.replace("`", "") in " ".join(text(audit).split()).replace("`", "")
    assert 'id="decisions"' in html(audit)
    few = replace(audit, decisions=(replace(found, operations=(replace(found.operations[0], count=20),)),))
    plan = audit.plans[audit.recommended]
    held = {plan.name: replace(plan, verification=replace(plan.verification, inputs="held-out"))}
    each = [(few, 0.002), (few, 0.003), (audit, 0.002), (replace(few, plans=held), 0.002)]  # flips alone: 0.0022
    proofs = [ReportView(replace(one, max_error=budget)).proof for one, budget in each]
    said = " decisions of argmax in the model's forward (test_decisions.py:"
    assert [said in proof for proof in proofs] == [True, False, False, False]


def test_a_short_terminal_leaves_decisions_to_the_report_and_a_criterion_states_them_in_its_limit() -> None:
    audit = auditor.audit(Codes(1.0), (X,), criteria=["output: rel_l2 <= 0.02"], formats=("bf16",))
    whole, short = (text(audit, width=100, most=most) for most in (60, 24))
    assert "Decisions that differ" in whole and "Decisions that differ" not in short
    assert re.search(r"Omitted +[\w, ]*decisions", short)
    assert " times its limit; with the decisions of the FP32 run, " in decision_words(audit)
