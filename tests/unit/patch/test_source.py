"""The original model as a patched_model.py makes it: the same checkpoints as the audit reads, and one line otherwise."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from auditor.loading.weights import load_into
from auditor.patch.source import SAFETENSORS, load_weights, make_original, read_safetensors
from tests.subjects import seeded


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def state() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in seeded(Tied, seed=7).state_dict().items()}


def safetensors(folder: Path) -> Path:
    save_file({k: v for k, v in state().items() if k != "head.weight"}, folder / "w.safetensors")
    return folder / "w.safetensors"


def sharded(folder: Path) -> Path:
    parts = {"a.safetensors": ["embed.weight"], "b.safetensors": [k for k in state() if k.startswith("norm")]}
    for file, names in parts.items():
        save_file({name: state()[name] for name in names}, folder / file)
    index = folder / "w.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, names in parts.items() for name in names}}))
    return index


def torch_file(content: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(content, folder / "w.pt")
        return folder / "w.pt"

    return write


CHECKPOINTS = {
    "safetensors, tied weights once": safetensors,
    "sharded": sharded,
    "plain": torch_file(state()),
    "in a container": torch_file({"epoch": 3, "model_state_dict": state()}),
    "from DDP and torch.compile": torch_file({f"module._orig_mod.{k}": v for k, v in state().items()}),
    "from Lightning": torch_file({"state_dict": {f"model.{k}": v for k, v in state().items()}, "lr": 0.1}),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_it_reads_what_the_audit_reads(kind: str, tmp_path: Path) -> None:
    path = CHECKPOINTS[kind](tmp_path)
    here, there = seeded(Tied), seeded(Tied)
    load_weights(here, path)
    load_into(there, path)
    assert here.head.weight is here.embed.weight
    for name, value in here.state_dict().items():
        assert torch.equal(value, there.state_dict()[name])
        assert torch.equal(value, state()[name])


def test_every_dtype_of_safetensors(tmp_path: Path) -> None:
    values = torch.arange(12).reshape(3, 4)
    expected = {key: values.to(dtype) for key, dtype in SAFETENSORS.items()}
    expected |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)}
    save_file(expected, tmp_path / "w.safetensors", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "w.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        assert torch.equal(found[key].float(), value.float())


WRONG = {
    "missing": {k: v for k, v in state().items() if k != "norm.bias"},
    "unexpected": {**state(), "norm.extra": torch.ones(1)},
    "another shape": {**state(), "norm.bias": torch.ones(5)},
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_checkpoint_is_refused_in_one_line_before_it_is_loaded(kind: str, tmp_path: Path) -> None:
    model = seeded(Tied)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"w\.pt does not fit the model, at 'norm\.") as caught:
        load_weights(model, torch_file(WRONG[kind])(tmp_path))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_symbol_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "renamed_net.py").write_text("class Other: pass\n")
    source = {"path": "renamed_net.py", "module": None, "symbol": "Net", "kind": "class", "weights": None}
    with pytest.raises(ValueError, match=r"renamed_net\.py has no 'Net' any more: audit it again"):
        make_original(source, str(tmp_path / "patched_model.py"), (), {})
