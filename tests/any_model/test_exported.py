"""Exported programs and fx graphs, whole or as a part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.any_model.holding import Call, held
from tests.any_model.test_scripted import Around, Images, Net, picture, row


def exported(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(model.eval(), (x,)).module()


def symbolic(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.fx.symbolic_trace(model.eval())


def unflattened(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.unflatten(torch.export.export(model.eval(), (x,)))


def concrete(model: nn.Module, x: torch.Tensor) -> Any:
    model.eval()
    return make_fx(lambda x: model(x))(x)


def build(how: Any, around: Any, make: Any = Net, example: Any = row) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    x = example()
    return around(how(make(), x)), ((x.clone(),), {})


def whole(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize("how", [exported, symbolic, unflattened, concrete], ids=lambda how: how.__name__)
def test_graphs_are_audited(how: Callable[..., Any]) -> None:
    audit = held(lambda: build(how, Around))
    assert audit.plans["cast_bf16"].low_precision_flops == 1


def test_graphs_with_buffers() -> None:
    held(lambda: build(exported, whole, Images, picture))


def test_beside_what_has_modes_of_its_own() -> None:
    """An exported module refuses `eval()`; the dropout after it is switched off all the same."""

    def make() -> tuple[nn.Module, Call]:
        model, call = build(exported, whole)
        return _joined(model), call

    audit = held(make)
    assert not any("dropout" in report.node.op for report in audit.nodes)


def _joined(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(model, nn.Dropout(0.5), nn.Linear(8, 4))


def test_loaded_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Net().eval(), (row(),)), file)
    held(lambda: build(lambda model, x: torch.export.load(file).module(), whole))
