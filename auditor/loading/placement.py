"""A subject on the device that the audit runs on; the caller's own model is not moved."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import AuditorError
from ..records import Subject


def placed(subject: Subject, native: bool) -> Subject:
    """The subject itself, or where a GPU runs the formats a copy of it there.

    Raises: AuditorError(slug="no-copy") where the model, or its loss, cannot be copied.
    """
    if not native:
        return subject
    objective = subject.objective
    if objective is not None:
        loss_fn = objective.loss_fn
        loss_fn = copied(loss_fn).cuda() if isinstance(loss_fn, nn.Module) else loss_fn
        objective = replace(objective, loss_fn=loss_fn, targets=_moved(objective.targets))
    return replace(
        subject,
        model=copied(subject.model).cuda(),
        batches=_moved(subject.batches),
        held_out=_moved(subject.held_out),
        objective=objective,
    )


def _moved(batches: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.cuda(), batches)


def copied(module: nn.Module) -> nn.Module:
    """A copy that can be moved: none of its modules and parameters is the caller's. Raises: AuditorError("no-copy")."""
    advice = "audit it with device='cpu'"
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise AuditorError(
            f"{type(module).__name__} cannot be copied to the GPU ({reason}): {advice}", "no-copy"
        ) from error
    own = {id(part) for part in (*module.modules(), *module.parameters())}
    if any(id(part) in own for part in (*twin.modules(), *twin.parameters())):
        raise AuditorError(
            f"copies of {type(module).__name__} share its modules or weights, so it cannot be moved to the GPU "
            f"without moving yours: {advice}",
            slug="no-copy",
        )
    return twin
