"""Models that accelerate offloaded: audited as the model that was, patched with their hooks on, and left as they were."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import offload
from auditor.errors import LoadError
from auditor.loading import from_object
from auditor.loading.state import held_outside, present
from auditor.offload.files import is_offloaded
from tests.support.refusing import refused
from tests.support.small_models import tied

accelerate = pytest.importorskip("accelerate")

CPU = torch.device("cpu")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied": (lambda: tied(16, 8, mid=nn.Linear(8, 8), act=nn.Tanh()), torch.arange(6)[None]),
    "buffers": (convolution, torch.ones(2, 3, 8, 8)),
    "stored low": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16(), X.bfloat16()),
    "read by its owner": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.ones(2, 5, 8)),
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
def test_the_weights_of_hooks_are_the_models_for_a_while(name: str, how: str, tmp_path: Path) -> None:
    model, x = made(name)
    offloaded = copy.deepcopy(model)
    OFFLOADS[how](offloaded, tmp_path / "weights")
    outside, before = held_outside(offloaded), portrait(offloaded)
    left = sum("running" in key or "tracked" in key for key in model.state_dict()) * (how == "in memory")
    assert len(outside) == len(model.state_dict()) - left
    with present(offloaded):
        assert not any(hasattr(module, "_hf_hook") or "forward" in vars(module) for module in offloaded.modules())
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in offloaded.state_dict().items())
    (note, *_) = from_object(offloaded, x).warnings
    assert note.startswith(f"accelerate offloads {len(outside)} of the model's tensors: they are in memory during the")
    assert portrait(offloaded) == before
    assert torch.equal(offloaded(x), model(x))


def test_plans_of_an_offloaded_model_are_those_of_the_model_and_hold_with_the_hooks_on(tmp_path: Path) -> None:
    model, x = made("tied")
    plain, offloaded = auditor.audit(copy.deepcopy(model), x, formats="bf16"), copy.deepcopy(model)
    to_disk(offloaded, tmp_path)
    found = auditor.audit(offloaded, x, formats="bf16")
    with torch.no_grad():
        reference = model(x)
    for name, plan in found.plans.items():
        assert plan.measured_error == plain.plans[name].measured_error
        patched = copy.deepcopy(model)
        to_disk(patched, tmp_path / name)
        with auditor.emulate("cuda"), torch.no_grad():
            answer = auditor.apply(patched, found, name)(x).float()
        error = float((answer - reference).double().norm() / reference.double().norm())
        assert error == pytest.approx(plan.measured_error, rel=1e-5)


def test_where_memory_is_limited_they_lie_in_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    accelerate.disk_offload(model, tmp_path, CPU)
    with offload.resident_limit(1 << 31):
        with present(model):
            assert is_offloaded(model[0].weight)
        gc.collect()
        notes = from_object(model, torch.ones(2, 512)).warnings
    assert "they lie in mapped files during the audit" in notes[0]


def test_what_a_hook_cannot_load_is_one_line(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    accelerate.disk_offload(model, tmp_path, CPU)
    before = portrait(model)
    for file in tmp_path.glob("*.dat"):
        file.unlink()
    with refused(LoadError, "meta-weights", match="is offloaded and cannot be loaded by accelerate's hook"):
        from_object(model, X)
    assert portrait(model) == before
