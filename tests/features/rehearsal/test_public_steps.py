"""Every figure that a rehearsal prints of five public repositories' steps, against a loop by hand."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.emulation.emulate import emulate, scaled_as_on_cuda
from tests.features.rehearsal.cases import Made, Way
from tests.features.rehearsal.public_steps import STEPS

COUNT = 9
"""Number of steps, each of which is sampled."""
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16_autocast": {"dtype": torch.bfloat16},
    "fp16_autocast": {"dtype": torch.float16, "scale": 65536.0},
    "bf16": {"stored": torch.bfloat16},
}

Gradients = dict[str, torch.Tensor]


class Hand:
    """A step by hand in one `Way`, with the gradients and updates of each call."""

    def __init__(self, make: Callable[..., Made], **how: Any) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.gradients: Gradients = {}
        self.lost: list[tuple[int, int]] = []
        self.is_frozen = False  # whether the last optimizer leaves the weights as they are
        self.way = Way(prepare=self._prepare, **how)
        self.step, batches = make(self.way)
        self.batches = cycle(batches)
        self.low = any(how.get(name) for name in ("dtype", "stored"))

    @property
    def names(self) -> dict[nn.Parameter, str]:
        models = enumerate(self.way.models)
        return {p: f"{i}.{name}" for i, model in models for name, p in model.named_parameters()}

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)
        before: dict[nn.Parameter, torch.Tensor] = {}

        def note(*call: Any) -> None:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                self.gradients[self.names[p]] = p.grad.detach().float().clone()
                before[p] = p.detach().clone()

        def count(*call: Any) -> None:
            for p, weight in before.items():
                moved = p.grad != 0
                self.lost.append((int(((p == weight) & moved).sum()), int(moved.sum())))

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(count)

    def call(self, batch: Any) -> float:
        self.gradients, self.lost = {}, []
        with emulate("cuda") if self.low else nullcontext(), scaled_as_on_cuda():
            return float(self.step(batch) if isinstance(batch, torch.Tensor) else self.step(*batch))

    def take(self, other: "Hand") -> None:
        """Take weights, buffers and optimizer states of another loop, in FP32."""
        for mine, theirs in zip(self.way.models, other.way.models, strict=True):
            mine.load_state_dict(theirs.state_dict())
        for one, theirs_ in zip(self.optimizers, other.optimizers, strict=True):
            one.zero_grad()
            one.load_state_dict(copy.deepcopy(theirs_.state_dict()))  # else the state would be shared


def relative(ours: Gradients, theirs: Gradients) -> float:
    apart = sum(float((theirs[name] - x).double().square().sum()) for name, x in ours.items())
    return math.sqrt(apart / sum(float(x.double().square().sum()) for x in ours.values()))


def by_hand(make: Callable[..., Made], name: str) -> dict[str, Any]:
    """The figures of a recipe: losses, steps without an update, loss scale, gradient errors, and lost updates."""
    low, exact = Hand(make, **WAYS[name]), Hand(make)
    torch.manual_seed(0)
    losses, errors, lost, skipped = list[float](), list[float | None](), list[float](), 0
    known: Gradients = {}
    for _ in range(COUNT):
        batch = next(low.batches)
        if name != "fp32":
            state = torch.get_rng_state()
            exact.take(low)
            exact.call(batch)
            known = exact.gradients
            torch.set_rng_state(state)
        before = len(low.way.skipped)
        losses.append(low.call(batch))
        is_skipped = any(low.way.skipped[before:])
        skipped += is_skipped
        if low.gradients:
            ours = {key: x for key, x in known.items() if key in low.gradients}
            error = relative(ours, low.gradients) if ours else None
            errors.append(error / math.sqrt(2) if error is not None and name == "fp32" else error)
            shares = [(a / b, n) for (a, b), n in zip(low.lost, _sizes(low), strict=True) if b]
            lost.append(sum(share * n for share, n in shares) / sum(n for _, n in shares))
        if name == "fp32":
            known = low.gradients
    scale = low.way.scaler.get_scale() if WAYS[name].get("scale") else None
    return {"losses": losses, "errors": errors, "lost": lost, "skipped": skipped, "scale": scale}


def _sizes(hand: Hand) -> list[int]:
    parameters = [p for one in hand.optimizers for group in one.param_groups for p in group["params"]]
    kept = {name: p.numel() for p, name in hand.names.items()}
    return [kept[hand.names[p]] for p in parameters if hand.names[p] in hand.gradients]


def last_third(values: list[Any]) -> float | None:
    few = [x for x in values[-max(len(values) // 3, 1) :] if x is not None]
    return sum(few) / len(few) if few else None


def figures_of(name: str) -> list[tuple[str, str, float | None, float | None]]:
    """(recipe, figure, of the rehearsal, by hand) of a public step."""
    make = STEPS[name]
    runs = {**auditor.rehearse(*make(Way()), steps=COUNT, remedies=False).runs}
    own = auditor.rehearse(*make(Way(**WAYS["fp16_autocast"])), steps=COUNT, remedies=False)
    runs["as_written"] = own.runs["as_written"]
    assert runs["as_written"].findings == []
    rows = []
    hands = {recipe: by_hand(make, recipe) for recipe in WAYS}
    for recipe in (*WAYS, "as_written"):
        run, hand = runs[recipe], hands.get(recipe, hands["fp16_autocast"])
        count = max(COUNT // 10, min(COUNT // 2, 8), 1)
        pairs = {
            "last loss": (run.last_loss(), sum(hand["losses"][-count:]) / count),
            "skipped": (len(run.skipped), hand["skipped"]),
            "scale": (run.scale, hand["scale"]),
            "gradient error": (run.share("error"), last_third(hand["errors"])),
            "updates lost": (run.share("updates_lost"), last_third(hand["lost"])),
        }
        rows += [(recipe, figure, *pair) for figure, pair in pairs.items()]
    return rows


def are_equal(ours: float | None, theirs: float | None) -> bool:
    """Whether two figures are equal to 1e-5, or both undefined."""
    if ours is None or theirs is None:
        return ours is theirs
    return math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_every_figure_is_that_of_a_loop_by_hand(name: str) -> None:
    rows = figures_of(name)
    assert len(rows) == 5 * (len(WAYS) + 1)
    assert any(recipe == "bf16" and figure == "updates lost" and ours for recipe, figure, ours, _ in rows)
    for recipe, figure, ours, theirs in rows:
        assert are_equal(ours, theirs), (recipe, figure, ours, theirs)


def test_the_figures_of_one_public_step_are_those_of_a_loop_by_hand() -> None:
    for recipe, figure, ours, theirs in figures_of("vae"):
        assert are_equal(ours, theirs), (recipe, figure, ours, theirs)
