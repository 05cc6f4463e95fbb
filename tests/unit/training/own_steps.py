"""Steps of training by torch alone, which what an audit says is held against."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import auditor
from auditor.capture.emulation import emulate
from auditor.records import Audit
from auditor.records.training import Training


def audited(model: nn.Module, batch: Any, loss: Callable[..., Any] | None, **asked: Any) -> tuple[Audit, Training]:
    found = auditor.audit(model, batch, mode="training", loss_fn=loss, device="cpu", **asked)
    assert found.training is not None
    return found, found.training


def low_gradients(
    model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor], plan: Any, scale: float = 1.0
) -> dict[str, Tensor]:
    """Of one step under a plan with the loss in FP32, by torch alone but for the emulation of a GPU; unscaled."""
    low = copy.deepcopy(model).train()
    low = auditor.apply(low, plan)
    with emulate("cuda"):
        value = loss(low(batch[0]).float(), *batch[1:])
        (value * scale).backward()
    return {name: p.grad.float() / scale for name, p in low.named_parameters() if p.grad is not None}


def fp32_gradients(model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    plain = copy.deepcopy(model).train()
    loss(plain(batch[0]), *batch[1:]).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def off(low: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    gap = sum(float((low[name] - g).double().square().sum()) for name, g in reference.items())
    return (gap / sum(float(g.double().square().sum()) for g in reference.values())) ** 0.5
