"""Models that are on GPUs already: on one, or spread over two as their authors or a device map spread them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree

from tests.support.replaying import Model


class Halves(nn.Module):
    """Its author moves values from one device to the other, and back."""

    def __init__(self, first: Any = "cpu", second: Any = "cpu") -> None:
        super().__init__()
        self.enter, self.inside = nn.Linear(8, 16).to(first), nn.Sequential(nn.Linear(16, 16), nn.GELU()).to(second)
        self.leave = nn.Linear(16, 4).to(first)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x.to(self.enter.weight.device)).relu()
        inside = self.inside(hidden.to(self.inside[0].weight.device))
        return self.leave(hidden + inside.to(hidden.device)).softmax(-1)


def fixed() -> nn.Module:
    """Names the device of its second layer."""
    return Model(
        lambda m, x: m.leave(m.enter(x).to("pretend:1")),
        enter=nn.Linear(8, 8).to("pretend:0"),
        leave=nn.Linear(8, 4).to("pretend:1"),
    )


def packed() -> nn.Module:
    """Lengths that torch takes on the CPU alone."""
    return Model(
        lambda m, x, lengths: m.over(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][0],
        over=nn.GRU(4, 8, batch_first=True),
    )


def mapped(model: nn.Module, places: dict[str, str]) -> nn.Module:
    """A device map by child: parameters there, and calls with their tensors moved there, as `accelerate` wraps forwards."""
    for name, place in places.items():
        child = model.get_submodule(name).to(place)
        child.forward = _there(child.forward, torch.device(place))  # type: ignore[method-assign]
    return model


def _there(forward: Any, place: torch.device) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(place), (args, kwargs))
        return forward(*args, **kwargs)

    return wrapped
