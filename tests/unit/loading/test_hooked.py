"""Models that accelerate offloaded: audited as the model that was, patched with their hooks on, and left as they were."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import offload
from auditor.errors import LoadError
from auditor.loading import from_object
from auditor.loading.hooked import held_outside, present
from auditor.offload.files import is_offloaded

accelerate = pytest.importorskip("accelerate")

CPU = torch.device("cpu")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mid, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.table(x))))  # type: ignore[no-any-return]


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)).eval()


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied": (Tied, torch.arange(6)[None]),
    "buffers": (convolution, torch.ones(2, 3, 8, 8)),
    "stored low": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16(), X.bfloat16()),
    "read by its owner": (attention, torch.ones(2, 5, 8)),
}


def to_memory(model: nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(model, execution_device=CPU, preload_module_classes=["MultiheadAttention"])


def to_disk(model: nn.Module, folder: Path) -> None:
    accelerate.disk_offload(model, folder, CPU, offload_buffers=True, preload_module_classes=["MultiheadAttention"])


OFFLOADS = {"in memory": to_memory, "on disk, buffers too": to_disk}


def made(name: str) -> tuple[nn.Module, Tensor]:
    build, x = MODELS[name]
    torch.manual_seed(0)
    return build(), x


def portrait(model: nn.Module) -> list[Any]:
    def of(module: nn.Module) -> list[Any]:
        own = vars(module)
        stores = [{key: id(x) for key, x in store.items()} for store in (module._parameters, module._buffers)]
        return [*own, id(own.get("_hf_hook")), id(own.get("forward")), *stores]

    return [of(module) for module in model.modules()]


@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("name", MODELS)
def test_an_offloaded_model_is_audited_as_the_one_in_memory(name: str, how: str, tmp_path: Path) -> None:
    model, x = made(name)
    plain, offloaded = auditor.audit(copy.deepcopy(model), x), copy.deepcopy(model)
    OFFLOADS[how](offloaded, tmp_path / "weights")
    count = len(held_outside(offloaded))
    before, answer = portrait(offloaded), offloaded.state_dict()
    found = auditor.audit(offloaded, x)
    assert portrait(offloaded) == before
    assert all(value.is_meta == answer[name].is_meta for name, value in offloaded.state_dict().items())
    assert torch.equal(offloaded(x), model(x))
    for plan in plain.plans:
        assert found.plans[plan].measured_error == plain.plans[plan].measured_error
    assert count == len(model.state_dict()) - sum("running" in k or "tracked" in k for k in answer) * (
        how == "in memory"
    )
    assert found.warnings[0].startswith(
        f"accelerate's hooks hold {count} of the model's tensors: they are in memory for the audit"
    )


@pytest.fixture
def unfused() -> Iterator[None]:
    """The path that the audit's reference does not take either is closed."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("name", MODELS)
def test_its_plans_hold_with_the_hooks_on(name: str, how: str, tmp_path: Path, unfused: None) -> None:
    model, x = made(name)
    found = auditor.audit(copy.deepcopy(model), x)
    with torch.no_grad():
        reference = copy.deepcopy(model).float()(x.float() if x.is_floating_point() else x)
    for plan in found.plans:
        patched = copy.deepcopy(model)
        OFFLOADS[how](patched, tmp_path / plan)
        auditor.apply(patched, found, plan)
        with auditor.imitated("cuda"), torch.no_grad():
            answer = patched(x).float()
        error = float((answer - reference).double().norm() / reference.double().norm())
        assert error == pytest.approx(found.plans[plan].measured_error, rel=1e-5)


def test_what_the_hooks_round_is_audited_as_stored_low() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    accelerate.cpu_offload(model, execution_device=CPU)
    model.half()  # of tensors without values: the hooks still hold FP32, and round it
    with present(model):
        assert model[0].weight.dtype is torch.float16
    assert from_object(model, X.half()).stored_low == {"float16": 72}


def test_where_memory_is_limited_they_lie_in_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    accelerate.disk_offload(model, tmp_path, CPU)
    with offload.limited(1 << 31):
        with present(model):
            assert is_offloaded(model[0].weight)
        gc.collect()
        notes = from_object(model, torch.ones(2, 512)).warnings
    assert "they lie in mapped files for the audit" in notes[0]


def test_what_a_hook_cannot_load_is_one_line(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    accelerate.disk_offload(model, tmp_path, CPU)
    before = portrait(model)
    for file in tmp_path.glob("*.dat"):
        file.unlink()
    with pytest.raises(LoadError, match="is offloaded, and its hook cannot load it") as caught:
        from_object(model, X)
    assert caught.value.slug == "meta-weights"
    assert "\n" not in str(caught.value)
    assert portrait(model) == before


def test_a_model_without_values_is_still_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    accelerate.disk_offload(model[0], tmp_path, CPU)
    with pytest.raises(LoadError, match=r"1\.weight is on the meta device") as caught:
        from_object(model, X)
    assert caught.value.slug == "meta-weights"
