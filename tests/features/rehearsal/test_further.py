"""Recipes on request: BF16 gradients of several ranks, the optimizer's state in BF16, stochastic rounding, Kahan sums."""

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.emulation.emulate import emulate
from auditor.errors import LoadError
from auditor.features.rehearsal.ranks import mean_gradient, shard
from auditor.features.rehearsal.rehearse import remedies_for
from auditor.features.rehearsal.result import FURTHER, code_of
from tests.features.rehearsal.cases import classes, mlp, plain
from tests.support.refusing import refused

BF16 = torch.bfloat16


def ranks_by_hand(batches: list[Any], ranks: int, summed: torch.dtype) -> list[float]:
    """Losses of SGD on the mean of the ranks' gradients, each rounded to BF16. The sum is clipped to the norm 0.5."""
    model, losses = mlp(16, 32, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in batches:
        of_ranks, total = [], 0.0
        for rank in range(ranks):
            optimizer.zero_grad()
            with emulate("cuda"), torch.autocast("cuda", dtype=BF16):
                loss = F.cross_entropy(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank])
            with emulate("cuda"):
                loss.backward()
            of_ranks.append([p.grad.to(BF16) for p in model.parameters() if p.grad is not None])
            total += float(loss.detach()) / ranks
        for p, *gradients in zip(model.parameters(), *of_ranks, strict=True):
            mean = gradients[0].to(summed) / ranks
            for gradient in gradients[1:]:
                mean = mean + gradient.to(summed) / ranks
            p.grad = mean.float()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
    return losses


def test_gradients_of_ranks_are_summed_in_fp32_and_in_bf16_as_by_hand() -> None:
    model = mlp(16, 32, 4)
    batches = classes(3)
    step = plain(model, torch.optim.SGD(model.parameters(), lr=0.5), clip=0.5)
    found = auditor.rehearse(step, batches, 3, recipes=["ranks"], ranks=4, remedies=False)
    runs = found.runs
    assert runs["bf16_autocast_ranks"].recipe.title == "BF16 autocast, 4 ranks, FP32 sums"
    assert runs["bf16_autocast_ranks"].losses == pytest.approx(ranks_by_hand(batches, 4, torch.float32), rel=1e-5)
    assert runs["bf16_autocast_ranks_bf16"].losses == pytest.approx(ranks_by_hand(batches, 4, BF16), rel=1e-5)
    assert runs["bf16_autocast_ranks"].losses == pytest.approx(runs["fp32"].losses, rel=2e-2)
    errors = {name: run.share("error") or 0.0 for name, run in runs.items()}
    assert errors["bf16_autocast_ranks"] < errors["bf16_autocast_ranks_bf16"] < 0.1
    assert found.recommended == "bf16_autocast"


def test_ranks_add_up_over_several_backward_passes() -> None:
    """The mean over ranks of accumulated gradients is the gradient of the whole batch, but for BF16's rounding."""
    model = mlp(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = F.cross_entropy(model(part), wanted) / 2
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    runs = auditor.rehearse(step, classes(2), 2, recipes=["ranks"], ranks=2, remedies=False).runs
    assert runs["bf16_autocast_ranks"].backward_passes == 2
    assert runs["bf16_autocast_ranks"].losses == pytest.approx(runs["fp32"].losses, rel=2e-2)
    assert all(error < 0.02 for error in runs["bf16_autocast_ranks"].errors)


def test_the_ring_rounds_every_sum() -> None:
    """BF16 numbers from 256 on are 2 apart: eight ranks' ones beside 256 are lost one by one in BF16, and none in FP32."""
    gradients = [torch.tensor([256.0 * 9]), *[torch.tensor([9.0])] * 8]  # divided by 9: 256 and eight ones
    assert mean_gradient(gradients, "bf16", "bf16") == 256
    assert mean_gradient(gradients, "bf16", "fp32") == 264


def test_a_batch_is_split_by_rows() -> None:
    x, y = torch.arange(6.0).view(6, 1), torch.arange(6)
    part = shard({"x": x, "y": [y], "scale": torch.ones(()), "table": torch.ones(3)}, 1, 3)
    assert part["x"].flatten().tolist() == part["y"][0].tolist() == [2, 3]
    assert (part["scale"].shape, part["table"].shape) == ((), (3,))
    with refused(LoadError, "bad-step", match="a batch of 6 rows cannot be split over 8 ranks"):
        shard((x, y), 0, 8)


def test_state_in_bf16_is_rounded_after_every_step_as_by_hand() -> None:
    """Adam's second moments shrink by 1/1000 in a step, less than half the spacing of BF16, 2^-9: they stay as they are
    after the first batch, whose inputs are 1,000 times larger."""
    batches = classes(4)
    batches[0] = batches[0][0] * 1000, batches[0][1]
    model = mlp(16, 32, 4)
    step = plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = auditor.rehearse(step, iter(batches), 4, recipes=["bf16_state"], remedies=False)
    run = found.runs["bf16_autocast_bf16_state"]
    model = mlp(16, 32, 4)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for x, y in batches:
        optimizer.zero_grad()
        with emulate("cuda"), torch.autocast("cuda", dtype=BF16):
            loss = F.cross_entropy(model(x), y)
        with emulate("cuda"):
            loss.backward()
        optimizer.step()
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].to(BF16))
        losses.append(float(loss.detach()))
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert run.share("second_moment_stuck") > 0.5 > found.runs["bf16_autocast"].share("second_moment_stuck")
    assert ("bf16_autocast_bf16_state", "second-moment-stuck") in {(p.recipe, p.kind) for p in found.problems}
    assert "register_step_post_hook" in code_of("bf16_state")


def test_further_recipes_stand_beside_the_others_and_have_no_variants() -> None:
    model = mlp(16, 32, 4)
    step = plain(model, torch.optim.AdamW(model.parameters(), lr=1e-6))  # BF16 weights lose such updates
    found = auditor.rehearse(step, classes(2), 2, recipes=["all"], ranks=2)
    names = ["bf16_stochastic_rounding", "bf16_kahan_sums", "bf16_autocast_bf16_state"]
    assert [*found.runs][4:9] == [*names, "bf16_autocast_ranks", "bf16_autocast_ranks_bf16"]
    assert not any(recipe.repairs in names for recipe in remedies_for(found.runs))
    assert {"updates-lost"} <= {problem.kind for problem in found.problems_of("bf16")}
    assert not found.problems_of("bf16_kahan_sums")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"recipes": ["kahan"]},
            "no recipe is called 'kahan': give stochastic_rounding, kahan_sums, bf16_state, ranks",
        ),
        ({"ranks": 1}, "ranks must be a whole number from 2 on"),
    ],
)
def test_unknown_recipes_are_refused(options: Any, said: str) -> None:
    with refused(LoadError, "bad-step", match=said):
        auditor.rehearse(lambda: None, cycle([None]), 1, **options)
    assert len(FURTHER) == 4
