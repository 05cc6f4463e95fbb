"""A model's tensors in mapped files: the same objects, tied as they were."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from auditor.offload import Arena, onto
from auditor.offload.spilling import is_mapped


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        whole = torch.randn(2, 32, 32)
        self.first, self.second = nn.Parameter(whole[0]), nn.Parameter(whole[1])
        self.register_buffer("table", torch.randn(32, 32).t())
        self.register_buffer("small", torch.ones(3))


def test_the_same_objects_with_the_same_entries_over_as_many_storages(tmp_path: Path) -> None:
    model, arena = Tied(), Arena(tmp_path)
    before = {name: (x, x.detach().clone(), x.stride()) for name, x in model.state_dict(keep_vars=True).items()}
    assert onto(model, arena, 4096) == 4 * (50 * 32 + 2 * 32 * 32 + 32 * 32)
    for name, x in model.state_dict(keep_vars=True).items():
        same, entries, strides = before[name]
        assert x is same and torch.equal(x, entries) and x.stride() == strides
        assert is_mapped(x.untyped_storage()) == (name != "small")
    assert model.head.weight is model.embed.weight
    assert model.first.untyped_storage().data_ptr() == model.second.untyped_storage().data_ptr()
    assert onto(model, arena, 4096) == 0
