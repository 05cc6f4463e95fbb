"""The user's function on a model in hand, and how far it is in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from ..imitation import as_on
from ..isolation import isolated
from ..patch.runtime import apply_plan
from ..raised import let_through
from ..score import Given, Scoring, Unscored, given_by
from .running import failure_of

FP32 = "fp32"
"""What the FP32 model is called among the plans."""

COUNTED = "counted"
"""The file that says of which plan there are how many numbers so far."""

Told = Callable[[str], None]
"""Hears how far the function is, in words; "" where it has given nothing so far."""


def score_here(
    model: nn.Module,
    plan: Mapping[str, Any] | None,
    scoring: Scoring,
    *,
    name: str = FP32,
    seed: int = 0,
    device: str = "cpu",
    most: int | None = None,
    timeout: float | None = None,
    told: Told = lambda words: None,
) -> Given | str:
    """What the function gives of a model under a plan, or the one-line reason why it gives nothing.

    plan: as `apply_plan` takes it, None for the model as it is. most: see `given_by`. Code that neither calls the model
    nor gives a number is not ended by `timeout`.
    """
    around = nullcontext if name == FP32 else partial(as_on, device)
    try:
        with isolated(model):
            if plan is not None:
                apply_plan(model, dict(plan))
            return given_by(
                scoring,
                model,
                seed=seed,
                around=around,
                most=most,
                limit=timeout,
                told=lambda count: told(counted(name, count)),
            )
    except Unscored as error:
        return str(error)
    except Exception as error:
        let_through(error, memory=False)
        return failure_of(error)


def counted(plan: str, count: int) -> str:
    """How far the function is, in words."""
    return f"{plan.replace('_', ' ')}: {count:,}"
