"""A plan applied to the caller's own model for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..state.restored import restored
from .runtime import apply_plan


@contextmanager
def patched(model: nn.Module, plan: Mapping[str, Any]) -> Iterator[nn.Module]:
    """`model` itself, following `plan` in the body; after it the model is as it was, see `restored`.

    plan: as `apply_plan` takes it. Raises: ValueError where the plan does not fit.
    """
    with restored(model):
        yield apply_plan(model, dict(plan))
