"""The model inside torch.compile, DataParallel or DistributedDataParallel, and what its reader has to know of that."""

from __future__ import annotations

from torch import nn

from ..isolation.members import unwrapped, wrapper_of


def unwrap(model: nn.Module) -> tuple[nn.Module, *tuple[str, ...]]:
    """The model that is wrapped, and a note where it is."""
    name = wrapper_of(model)
    if name is None:
        return (model,)
    inner = unwrapped(model)
    kind = "torch.compile" if name == "_orig_mod" else type(model).__name__
    return inner, (
        f"The model is wrapped in {kind}: the {type(inner).__name__} inside is audited, as it runs uncompiled and in one "
        "process. Plans apply to the wrapped model and to the one inside."
    )
