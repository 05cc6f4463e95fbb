"""Small random changes of a model's weights, for runs that show how much a result depends on them."""

from __future__ import annotations

import torch
from torch import nn

CHANGE = 0.01
"""Standard deviation of the change of a parameter, relative to the root mean square of its entries: that of a few updates
of an optimizer."""


def change_weights(model: nn.Module, seed: int, frozen: bool = False) -> None:
    """Add noise of relative size CHANGE to every trainable parameter. frozen: also to those that are not trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_changed = frozen or parameter.requires_grad
            if is_changed and parameter.is_floating_point() and parameter.numel():
                size = CHANGE * float(parameter.detach().float().square().mean().sqrt())
                noise = torch.randn(parameter.shape, generator=generator) * size
                parameter.add_(noise.to(parameter.device, parameter.dtype))
