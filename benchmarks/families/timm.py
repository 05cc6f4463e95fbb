"""timm: the smallest model of every module, at the smallest image it takes."""

from __future__ import annotations

from functools import cache

import timm
import torch

from . import Built, Unbuilt

LARGE = 40_000_000
"""Parameters from which on a model is made with two layers, where its constructor takes a depth."""
SIDES = (64, 96, 128, 160, 192, 224, 256, 384)


def names() -> list[str]:
    """Modules of timm."""
    return [name for name in timm.list_modules() if timm.list_models(module=name)]


def build(name: str) -> Built:
    """The smallest model of the module; the first side that its forward takes."""
    chosen, last = _smallest(name), Exception()
    parameters = _parameters(chosen)
    shallow = {"depth": 2} if parameters > LARGE else {}
    for side in SIDES:
        for options in ({"img_size": side, **shallow}, shallow, {"img_size": side}, {}):
            try:
                if parameters > LARGE:  # whether the size fits, without making the weights
                    with torch.device("meta"):
                        _run(chosen, side, options)
                return _run(chosen, side, options)
            except Exception as error:  # the size does not fit; the next one may
                last = error
    raise Unbuilt(f"{chosen}: {last}") from last


def _run(name: str, side: int, options: dict[str, int]) -> Built:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, **options).eval()
    image = torch.randn(2, 3, side, side)
    with torch.no_grad():
        model(image)
    return model, (image,), {}


@cache
def _smallest(module: str) -> str:
    return min(timm.list_models(module=module), key=_parameters)


@cache
def _parameters(name: str) -> float:
    """How many parameters a model has, without making them; infinite where its constructor computes with them."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(name, pretrained=False).parameters())
    except Exception:  # whatever a constructor may raise on tensors without values
        return float("inf")
