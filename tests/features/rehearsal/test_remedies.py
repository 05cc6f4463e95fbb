"""A rehearsal finds what was planted and repairs it, with remedies that do what they say."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.features.rehearsal.page import overview
from auditor.features.rehearsal.result import REMEDIES, ROUNDINGS, Recipe, RecipeProblem, RecipeRun, Rehearsal, code_of
from auditor.report.blocks import Item
from tests.features.rehearsal.cases import CASES, classes, mlp, plain, rehearsed
from tests.support.thinned import thinned


@pytest.mark.slow
def test_decay_below_half_a_spacing_is_lost_and_three_remedies_bring_it_back() -> None:
    found = rehearsed("lost_decay", 4)  # lr * decay = 3e-4, and half a spacing of BF16 is 2^-9 = 2e-3 at most
    assert found.runs["bf16"].share("decay_lost") == pytest.approx(1, abs=0.01)
    assert found.runs["fp32"].share("decay_lost") == 0
    for remedy in ("fp32_master_weights", "stochastic_rounding", "kahan_sums"):
        assert found.runs[f"bf16_{remedy}"].share("decay_lost") == 0
    entry = next(p for p in found.problems if p.kind == "decay-lost")
    assert entry.recipe == "bf16"
    assert "100%" in entry.text


class Shrinking(torch.optim.Optimizer):
    """An optimizer of the user's own, whose decay multiplies the weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(1 - 1e-4).add_(p.grad, alpha=-1e-3)


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        (lambda p: torch.optim.Adafactor(p, lr=1e-3, weight_decay=0.1), 1),
        (lambda p: torch.optim.SGD(p, lr=1e-3, weight_decay=0.1), 0),  # added to the gradient, which it changes
        (Shrinking, None),
    ],
    ids=["multiplied", "added", "not known"],
)
def test_what_becomes_of_decay_is_said_where_it_is_known_how_it_acts(kind: Any, lost: float | None) -> None:
    model = mlp(16, 32, 4)
    found = auditor.rehearse(plain(model, kind(model.parameters())), classes(4), 2, remedies=False)
    share = found.runs["bf16"].share("decay_lost")
    assert share is None if lost is None else share == pytest.approx(lost, abs=0.1)


@pytest.mark.slow
def test_a_master_copy_trains_as_fp32_does_and_plain_bf16_does_not() -> None:
    found = rehearsed("vanishing_updates", 10)
    last = {name: run.losses[-1] for name, run in found.runs.items()}
    assert found.runs["bf16"].share("updates_lost") > 0.8
    assert abs(last["bf16_fp32_master_weights"] - last["fp32"]) < 0.02


@pytest.mark.slow
def test_an_update_that_ruins_the_weights_is_the_optimizers() -> None:
    found = rehearsed("adam_in_fp16", 3)  # eps = 1e-8 and most second moments are zero in FP16: 0 / 0, or x / 0
    run = found.runs["as_written"]
    assert [(each.step, each.where) for each in run.skipped] == [(0, "the update of AdamW, from finite gradients")]
    assert len(run.losses) == 1  # the weights are ruined: further steps would say nothing
    assert "as_written" in {each.recipe for each in found.problems if each.kind == "not-finite"}
    assert (len(found.runs["as_written_eps"].losses), found.runs["as_written_eps"].skipped) == (3, [])


@pytest.mark.parametrize("name", sorted(REMEDIES))
def test_the_code_of_a_remedy_runs_as_pasted(name: str) -> None:
    """In BF16, weights of 1 and a gradient of 1 at a rate of 1e-3, 64 times: plain SGD stays at 1, exact sums end at 0.936."""
    weight = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    exec(code_of(name), {"optimizer": optimizer, "torch": torch})
    torch.manual_seed(0)
    for _ in range(64):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert weight.dtype is torch.bfloat16
    expected = 0.936 if name in ROUNDINGS else 1.0
    assert optimizer.param_groups[0].get("eps") == (1e-4 if name == "eps" else None)
    assert float(weight.detach().float().mean()) == pytest.approx(expected, abs=2**-8)


def test_gradients_of_many_passes_are_summed_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    sums = {}
    for name in ("plain", "fp32"):
        if name == "fp32":
            REMEDIES["fp32_accumulation"][1](optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(512):
                weight.sum().backward()
            sums[name] = float(weight.grad)  # type: ignore[arg-type]
    assert sums == {"plain": 256, "fp32": 512}  # 256 + 1 rounds to 256


@pytest.mark.parametrize(
    ("factors", "kind", "scale"),
    thinned(
        [
            # times 65536, most gradients are below FP16's smallest number
            ([1e-11] * 12, "gradients-off", 2.0**24),
            # six steps are skipped down to 2^10; a 16th of that is a margin
            ([1.0] * 6 + [1e3] * 6, "steps-skipped", 2.0**6),
            # the first nine steps are skipped, and the others do not make up for them
            ([1e3] * 24, "loss-behind", 2.0**3),
        ]
    ),
    ids=["underflow", "overflow", "late start"],
)
def test_another_loss_scale_is_tried_where_the_first_one_does_not_fit(
    factors: list[float], kind: str, scale: float
) -> None:
    def loss_fn(out: torch.Tensor, target: tuple[torch.Tensor, float]) -> torch.Tensor:
        return F.cross_entropy(out, target[0]) * target[1]

    model = mlp(16, 4)
    step = plain(model, torch.optim.SGD(model.parameters(), lr=1e-3 / max(factors)), loss_fn)
    found = auditor.rehearse(
        step, [(x, (y, f)) for (x, y), f in zip(classes(len(factors)), factors, strict=True)], len(factors)
    )
    assert kind in {each.kind for each in found.problems_of("fp16_autocast")}
    assert found.runs["fp16_autocast_scale"].recipe.scale == scale
    assert found.problems_of("fp16_autocast_scale") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_was_planted_is_found_and_repaired(name: str) -> None:
    case, found = CASES[name], rehearsed(name, 4 if name == "accumulation_over_many" else 80)  # of 256 passes each
    kinds = {(each.recipe, each.kind) for each in found.problems}
    assert found.recommended == case.recommended
    assert set(case.broken) <= kinds
    assert set(case.holding).isdisjoint(recipe for recipe, _ in kinds)
    assert not case.repaired or not any((case.repaired, kind) in kinds for _, kind in case.broken)


# What each remedy does is said where it matters, and once.


def notes(*problems: RecipeProblem) -> list[list[str]]:
    recipes = (
        Recipe("fp32", "FP32"),
        Recipe("bf16", "BF16", "bf16", stored=True),
        Recipe("bf16_master", "BF16 with a master copy", "bf16", repairs="bf16"),
        Recipe("bf16_kahan", "BF16 with Kahan sums", "bf16", repairs="bf16"),
    )
    runs = {recipe.name: RecipeRun(recipe, [2.0, 1.0], steps=[0, 1]) for recipe in recipes}
    result = Rehearsal("train.py:step", 2, 2, runs, problems, "fp32", "")
    return [list(block.notes) for block in overview(result) if isinstance(block, Item)]


def test_what_remains_with_each_remedy_is_said_below_the_last_problem() -> None:
    lost, decay = RecipeProblem("bf16", "updates", "96% lost"), RecipeProblem("bf16", "decay", "all lost")
    still = RecipeProblem("bf16_kahan", "decay", "half lost")
    ends = RecipeProblem("bf16_kahan", "not-finite", "NaN in step 3")
    assert notes(lost, decay, still, ends) == [
        [],
        [
            "BF16 with a master copy: no problem; final loss 1.",
            "BF16 with Kahan sums: decay, half lost; not-finite, NaN in step 3; final loss 1.",
        ],
    ]
