"""Weights that were loaded in low precision stay loaded weights, whatever names their modules get afterwards."""

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from auditor.loading.watch import ledger_of, watch_weights
from tests.support.subjects import seeded


class Adapted(nn.Module):
    """A layer with an adapter in FP32, with the names that PEFT gives them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result."""
        return self.base_layer(x)


class Around(nn.Module):
    """A module that contains a model under names of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"inner": model})
        self.extra = nn.Linear(2, 2)


class Half(nn.Module):
    """Two layers that a file fills in BF16, as from_pretrained does: the file's tensors become the parameters."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        for name, x in safetensors.torch.load_file(file).items():
            owner, _, kind = name.partition(".")
            self.get_submodule(owner).register_parameter(kind, nn.Parameter(x))


def adapted(model: nn.Module) -> nn.Module:
    model.add_module("first", Adapted(model.get_submodule("first")))  # type: ignore[arg-type]
    return Around(model)


def normed(model: nn.Module) -> nn.Module:
    parametrizations.weight_norm(model.get_submodule("first"), "weight")
    return Around(model)


@pytest.mark.parametrize("rename", [Around, adapted, normed])
def test_a_loaded_weight_is_known_under_its_new_name(rename: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    plain = seeded(lambda: nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)}))
    file = tmp_path / "weights.safetensors"
    save_file({name: x.bfloat16() for name, x in plain.state_dict().items()}, file)

    def build() -> nn.Module:
        return rename(Half(file))

    with watch_weights(build.__code__) as watch:
        model = build()
    watch.read_files(model)
    rows, casts = ledger_of(model, watch)
    low = [row for row in rows if row.loaded == "bfloat16" and "original0" not in row.name]
    assert {row.checkpoint for row in low} == {"bfloat16"}
    assert not [name for cast in casts for name in cast.names if "original0" not in name]


def test_a_tensor_of_other_values_is_not_taken_for_a_loaded_one(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"first.weight": torch.ones(4, 4).bfloat16()}, file)

    def build() -> nn.Module:
        safetensors.torch.load_file(file)
        inner = nn.Module()
        inner.first = nn.Linear(4, 4).bfloat16()
        return Around(inner)

    with watch_weights(build.__code__) as watch:
        model = build()
    watch.read_files(model)
    rows, _ = ledger_of(model, watch)
    assert all(row.checkpoint is None for row in rows)
