"""The recipes of a rehearsal, remedies for weights in BF16 or FP16, and results."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ...records.written import plain

Series = list[float | None]


@dataclass(frozen=True)
class Recipe:
    """One way to run a training step.

    format: of autocast regions; or of weights, gradients and optimizer state if `stored`. remedies: names in REMEDIES.
    scale: initial loss scale of a GradScaler; None for no scaler. scopes: the scopes of a plan, or modules kept in FP32;
    with LOSS among them, autocast covers only the model, whose outputs are cast to FP32. repairs: the name of the recipe
    that this variant repairs. ranks: number of simulated ranks, each with a part of the batch's rows and gradients in
    the recipe's format, whose sum is in the format `summed`.
    """

    name: str
    title: str
    format: str = "fp32"
    stored: bool = False
    remedies: tuple[str, ...] = ()
    scale: float | None = None
    scopes: Mapping[str, Any] = field(default_factory=dict)
    repairs: str = ""
    ranks: int = 1
    summed: str = "fp32"

    @property
    def keeps_scalers(self) -> bool:
        """Whether the step's own GradScalers act."""
        return self.name in (AS_WRITTEN, SCALED.name)


FP32 = Recipe("fp32", "FP32")
SCALED = Recipe("fp32_scaled", "FP32, own GradScalers")
"""Of trial steps: the step in FP32 with its own GradScalers."""
AS_WRITTEN = "as_written"
"""The name of the recipe in which the step runs with its own autocast regions and GradScalers."""


def fp32_updates(optimizer: Any, rounding: str) -> None:
    """Make the optimizer update weights in FP32, with its state in FP32. rounding: how to treat the part of an update
    that the stored weight cannot represent: "master" keeps the part in FP32, "kahan" in BF16; "stochastic" rounds up
    with the probability that makes the mean exact."""
    import torch

    rest: dict[Any, Any] = {}
    updated: list[Any] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            updated.append((p, p.dtype))
            grad, p.grad = p.grad.float(), None
            p.data = p.data.float() + rest.get(p, 0.0)
            p.grad = grad

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p, stored in updated:
            exact, p.grad = p.data, None
            if rounding == "stochastic":
                bits = exact.contiguous().view(torch.int32)
                p.data = ((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32).to(stored)
            else:
                p.data = exact.to(stored)
                rest[p] = (exact - p.data).to(torch.float32 if rounding == "master" else torch.bfloat16)
        updated.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def fp32_accumulation(optimizer: Any) -> None:
    """Sum the gradients of several backward passes in FP32. `zero_grad` must set gradients to None, its default."""
    sums: dict[Any, Any] = {}

    def add(p: Any, grad: Any) -> Any:
        sums[p] = grad.float() if p.grad is None else sums[p] + grad.float()
        p.grad = None  # torch would add the sum to it
        return sums[p].to(p.dtype)

    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.register_hook(lambda grad, p=p: add(p, grad))


def bf16_state(optimizer: Any) -> None:
    """Store the optimizer's state (Adam's moments, momentum) in BF16 between steps; each step computes in FP32."""
    import torch

    def convert(dtype: Any) -> None:
        for p, state in optimizer.state.items():
            for key, x in state.items():
                if torch.is_tensor(x) and x.is_floating_point() and x.shape == p.shape and x.dim():
                    state[key] = x.to(dtype or p.dtype)

    optimizer.register_step_pre_hook(lambda *call: convert(None))
    optimizer.register_step_post_hook(lambda *call: convert(torch.bfloat16))


def set_eps(optimizer: Any, eps: float) -> None:
    """Set the optimizer's eps. FP16 rounds 1e-8, Adam's default, to zero."""
    for group in optimizer.param_groups:
        group["eps"] = eps


ROUNDINGS = ("fp32_master_weights", "stochastic_rounding", "kahan_sums")
"""Remedies that update the weights in FP32."""
REMEDIES: dict[str, tuple[str, partial[None]]] = {
    "fp32_master_weights": ("FP32 master weights", partial(fp32_updates, rounding="master")),
    "stochastic_rounding": ("stochastic rounding", partial(fp32_updates, rounding="stochastic")),
    "kahan_sums": ("Kahan sums", partial(fp32_updates, rounding="kahan")),
    "fp32_accumulation": ("FP32 accumulation", partial(fp32_accumulation)),
    "eps": ("eps = 1e-4", partial(set_eps, eps=1e-4)),
    "bf16_state": ("the optimizer's state in BF16", partial(bf16_state)),
}
"""{name: (title, function of an optimizer)}. A rehearsal applies the function; reports print its code for the user."""


UNRESOLVED = 0.1
"""A parameter's gradient that changes by a larger share when FP32 weights move by their last bit is rounding: that of a bias
before a normalization, for example, is zero in exact arithmetic."""
RANKS = 8
"""Default number of simulated ranks."""


def further_recipes(names: Sequence[str], ranks: int = RANKS) -> tuple[Recipe, ...]:
    """Recipes that a rehearsal runs on request, beside the standard ones. names: of FURTHER, or "all"."""
    state = "bf16_autocast_bf16_state", "BF16 autocast, BF16 optimizer state"
    parallel = partial(Recipe, format="bf16", ranks=ranks)
    summed = "BF16 autocast, {} ranks, {} sums".format
    recipes = {
        "stochastic_rounding": (_stored_bf16("stochastic_rounding"),),
        "kahan_sums": (_stored_bf16("kahan_sums"),),
        "bf16_state": (Recipe(*state, "bf16", remedies=("bf16_state",)),),
        "ranks": (
            parallel("bf16_autocast_ranks", summed(ranks, "FP32")),
            parallel("bf16_autocast_ranks_bf16", summed(ranks, "BF16"), summed="bf16"),
        ),
    }
    chosen = recipes if "all" in names else names
    return tuple(recipe for name in chosen for recipe in recipes[name])


FURTHER = ("stochastic_rounding", "kahan_sums", "bf16_state", "ranks")
"""Names of `further_recipes`."""


def _stored_bf16(remedy: str) -> Recipe:
    return Recipe(f"bf16_{remedy}", f"BF16 with {REMEDIES[remedy][0]}", "bf16", stored=True, remedies=(remedy,))


def code_of(name: str) -> str:
    """Code that the user can paste: the remedy's function, and the call that applies the function."""
    _, remedy = REMEDIES[name]
    function = remedy.func
    annotations = r": (Any|str|float|dict\[Any, Any\]|list\[Any\])|( -> [^:]+)(?=:\n)"
    text = re.sub(annotations, "", inspect.getsource(function))
    options = [f"{key}={value!r}" for key, value in remedy.keywords.items()]
    call = ", ".join(["optimizer", *options])
    return f"{text}\n\n{function.__name__}({call})  # once, after creating the optimizer\n"


@dataclass(frozen=True)
class NonFiniteStep:
    """A training step with non-finite gradients, whose update is skipped, or with a non-finite update.

    step, batch: from 0; a repeated batch keeps its number. scale: the loss scale. where: the first operation with Inf or
    NaN, its module and line; "" if it was not searched for, or if FP32 is not finite there either.
    """

    step: int
    batch: int
    scale: float | None
    where: str = ""
    module: str | None = None


@dataclass(frozen=True)
class LossOrigin:
    """The operation at which the error of a loss begins. where: in words, with its line; module: its module; before,
    after: relative L2 error of its worst input and of its result, against FP32 at the same weights."""

    where: str
    module: str
    before: float
    after: float


@dataclass(frozen=True)
class StepFinding:
    """A call in the user's step that a correct training loop makes differently. kind: such as "clip-before-unscale", see
    observed.py; line: of the call, as `train.py:24`; step: the first step with it."""

    kind: str
    text: str
    line: str
    step: int


@dataclass(frozen=True)
class ParameterSeries:
    """Measurements of one parameter, one for each sampled step; None if undefined.

    module: path of the module that computes with it; empty for the root, and for a tensor that belongs to no module.
    error: relative L2 error of the gradient against FP32's at the same weights and batch; in an FP32 run the difference
    between gradients of two sampled steps, over sqrt(2). rounding: in an FP32 run, the relative L2 change of the gradient
    if all weights move by their last bit. Shares of entries: zero_gradient: the gradient is zero;
    updates_lost: a non-zero gradient changes no weight; decay_lost: weight decay changes no weight;
    second_moment_stuck: Adam's second moment should change by over a hundredth, but does not; second_moment_zero: the
    second moment is zero although the gradient is not.
    """

    entries: int
    group: int
    module: str = ""
    error: Series = field(default_factory=list)
    rounding: Series = field(default_factory=list)
    zero_gradient: Series = field(default_factory=list)
    updates_lost: Series = field(default_factory=list)
    decay_lost: Series = field(default_factory=list)
    second_moment_stuck: Series = field(default_factory=list)
    second_moment_zero: Series = field(default_factory=list)


def _mean_of_last_third(series: Series) -> float | None:
    """Mean of the known values in the last third of a series; None without one."""
    last = series[-max(len(series) // 3, 1) :]
    known = [value for value in last if value is not None]
    return sum(known) / len(known) if known else None


@dataclass
class RecipeRun:
    """Results of one recipe. losses: one per step, NaN if a step has no loss. steps: numbers of the sampled steps.

    errors: gradient errors of all parameters together, at these steps. skipped: non-finite steps; without a loss scale,
    such a step ends the run. scale: the loss scale at the end. batches: number of different batches. backward_passes:
    number per step. failure: why the run ended early; a failed run has only the losses of earlier steps. findings: of
    the recipe "as_written". bad_losses: steps whose loss is Inf or NaN although gradients and weights are finite.
    exact_losses: FP32's losses at the sampled steps, at the same weights; None if unknown. loss_origin: where the error
    of the losses begins, if they differ much from these.
    """

    recipe: Recipe
    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    errors: Series = field(default_factory=list)
    parameters: dict[str, ParameterSeries] = field(default_factory=dict)
    skipped: list[NonFiniteStep] = field(default_factory=list)
    scale: float | None = None
    batches: int = 0
    backward_passes: int = 0
    failure: str | None = None
    findings: list[StepFinding] = field(default_factory=list)
    bad_losses: list[NonFiniteStep] = field(default_factory=list)
    exact_losses: Series = field(default_factory=list)
    loss_origin: LossOrigin | None = None

    def share(self, what: str, name: str = "") -> float | None:
        """Mean of a series of ParameterSeries over the last third of the sampled steps, for one parameter or for all
        parameters' entries; the error of all is that of their common gradient. None if not measured."""
        if (what, name) == ("error", ""):
            return _mean_of_last_third(self.errors)
        total, weight = 0.0, 0
        for key, parameter in self.parameters.items():
            mean = _mean_of_last_third(getattr(parameter, what)) if name in ("", key) else None
            if mean is not None:
                total += parameter.entries * mean
                weight += parameter.entries
        return total / weight if weight else None

    def is_rounding(self, name: str) -> bool:
        """In an FP32 run: whether a parameter's gradient is nothing but rounding, so that it cannot be compared."""
        return (self.share("rounding", name) or 0.0) > UNRESOLVED

    @property
    def final(self) -> list[float]:
        """The losses of the last tenth of the steps, but at least of eight; under 16 steps, of half of the steps."""
        count = max(len(self.losses) // 10, min(len(self.losses) // 2, 8), 1)
        return self.losses[-count:]

    def last_loss(self) -> float:
        """The mean of the final losses."""
        return sum(self.final) / len(self.final) if self.final else math.nan


@dataclass(frozen=True)
class RecipeProblem:
    """A problem of a recipe, with evidence. kind: such as "loss-behind", see rehearse.py; module: the module to blame, if
    known; line: the line of the user's step to change, if known."""

    recipe: str
    kind: str
    text: str
    module: str | None = None
    line: str = ""


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal's results. recommended: a recipe, "fp32" if all others have problems. runs: {recipe: results}."""

    target: str
    steps: int
    batches: int
    runs: Mapping[str, RecipeRun]
    problems: tuple[RecipeProblem, ...]
    recommended: str
    recommendation: str

    def problems_of(self, name: str) -> list[RecipeProblem]:
        """The problems of one recipe."""
        return [problem for problem in self.problems if problem.recipe == name]

    def to_dict(self) -> dict[str, Any]:
        """All results as plain data, with Inf and NaN as text."""
        return {"format_version": 1, **plain(asdict(self))}
