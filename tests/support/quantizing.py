"""Models quantized by hand, which the measured and planned ones are held against."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from auditor.numerics.quantize import fake_quantize
from auditor.numerics.schemes import SCHEMES


def by_hand(model: nn.Module, layers: Mapping[str, str]) -> nn.Module:
    """A copy of the model whose layers have quantized weights and quantize their inputs; channels of a convolution last.

    layers: {path: scheme, or "" to leave it}.
    """
    model = copy.deepcopy(model)
    for path, scheme in layers.items():
        if not scheme:
            continue
        module, by = model.get_submodule(path), SCHEMES[scheme].activation
        convolves = isinstance(module, nn.Conv1d)
        with torch.no_grad():
            weight = module.weight.movedim(1, -1) if convolves else module.weight
            made = fake_quantize(weight.reshape(len(weight), -1), SCHEMES[scheme].weight).values.view(weight.shape)
        module.weight = nn.Parameter(made.movedim(-1, 1) if convolves else made)
        if by is not None and not isinstance(module, nn.Embedding):
            assert not convolves
            module.register_forward_pre_hook(lambda _, args, by=by: (fake_quantize(args[0], by).values,))
    return model


def change(model: nn.Module, other: nn.Module, x: Tensor) -> float:
    """Relative L2 distance of the other model's output."""
    with torch.no_grad():
        reference = model(x)
        return float((other(x) - reference).norm() / reference.norm())


def fp8_alone(model: nn.Module, path: str, least: float = 0.0) -> nn.Module:
    """A copy of the model with one linear layer in FP8, in plain torch: a scale for each row of weight and input.

    least: a lower bound of a row's largest magnitude."""
    model = copy.deepcopy(model)
    module = model.get_submodule(path)

    def by_rows(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=least) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    module.weight = nn.Parameter(by_rows(module.weight.detach()))
    module.register_forward_pre_hook(lambda _, args: (by_rows(args[0]),))
    return model
