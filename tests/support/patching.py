"""The model and the plans that the tests of patching share."""

from typing import Any

import torch
from torch import Tensor, nn

from auditor.artefact.applying import apply_plan
from tests.support.subjects import normal, seeded


class Net(nn.Module):
    """Two children, a container, a buffer, a keyword and dtypes noted as they pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.norm(self.first(x))) * scale + self.shift


def scope(precision: str, output: str = "cast") -> dict[str, str]:
    return {"precision": precision, "output": output}


def plan(strategy: str, scopes: dict[str, dict[str, str]], fmt: str = "bf16") -> dict[str, Any]:
    return {"strategy": strategy, "format": fmt, "scopes": scopes}


AUTOCAST = plan("autocast", {"": scope("bf16"), "norm": scope("fp32"), "head.2": scope("fp32")})
CAST = plan("cast", {"": scope("bf16"), "norm": scope("fp32"), "head.2": scope("fp32", "keep")})
PLANS = {"autocast": AUTOCAST, "cast": CAST}


def patched(name: str) -> nn.Module:
    return apply_plan(seeded(Net), PLANS[name])


class Shared(Net):
    """Tied weights, a buffer of two modules, two buffers on one storage, a forward of the instance's own, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(4, 8)
        self.twin.weight = self.first.weight
        self.norm.register_buffer("shift", self.shift)
        table = torch.arange(6.0)
        self.register_buffer("front", table[:4])
        self.register_buffer("back", table[2:], persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(3))
        self.seen: dict[str, Any] = {}
        gelu = self.head[1]
        gelu.forward = lambda x: type(gelu).forward(gelu, x) * 1.0  # type: ignore[method-assign]

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.seen["x"], self.last = x, x
        hidden = self.norm(self.first(x) + self.twin(x))
        return self.head(hidden) * scale + self.shift + self.front.sum() + self.back.sum()


def shared() -> nn.Module:
    model = seeded(Shared)
    model(normal(2, 4)).sum().backward()
    model.seen.clear()
    return model


def tensor_state(x: Tensor) -> tuple[Any, ...]:
    grad = None if x.grad is None else (id(x.grad), x.grad.dtype, x.grad.tolist())
    place = (x.data_ptr(), x.untyped_storage().data_ptr(), x.stride(), x.dtype)
    return (id(x), *place, x.detach().tolist(), x.requires_grad, grad)


def identity(model: nn.Module) -> list[Any]:
    """Everything about a model by value and by identity, in order."""
    found: list[Any] = []
    for path, module in model.named_modules(remove_duplicate=False):
        found += [path, [(key, id(value)) for key, value in vars(module).items()]]
        for key, value in vars(module).items():
            if isinstance(value, dict):
                found.append((key, [(name, id(item)) for name, item in value.items()]))
                found.append([tensor_state(item) for item in value.values() if isinstance(item, Tensor)])
    return found


def versions(model: nn.Module) -> list[int]:
    """How often each tensor was written to: a graph of the caller's refuses to run backwards when these rise."""
    return [x._version for x in (*model.parameters(), *model.buffers())]
