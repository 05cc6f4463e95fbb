"""PyTorch's transformer layers fuse their modules in eval mode without gradients; where a scope lies inside they must not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.artefact.applying import apply_plan
from tests.support.patching import plan, scope
from tests.support.subjects import normal

ISLAND = {"": scope("bf16"), "layers.1.linear2": scope("fp32")}


def encoder() -> nn.TransformerEncoder:
    """Two layers that take the fused path, and with a padding mask nested tensors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2).eval()


def padded() -> dict[str, Tensor]:
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    return {"src_key_padding_mask": mask}


def real(output: Tensor) -> Tensor:
    """The entries that no mask hides."""
    return torch.cat([output[0], output[1, :4]]).float()


def close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm() / b.norm()) < 0.02


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("inputs", [dict, padded], ids=["whole", "padded"])
@pytest.mark.parametrize("strategy", ["cast", "autocast"])
@pytest.mark.parametrize(
    "scopes",
    [
        ISLAND,
        {"": scope("bf16"), "layers.0": scope("fp32")},
        {"": scope("fp32", "keep"), "layers.1": scope("bf16")},
        {"": scope("bf16"), "layers.1.self_attn": scope("fp32")},
    ],
    ids=["island", "layer", "low layer", "attention"],
)
def test_a_patched_encoder_runs_with_and_without_gradients(
    scopes: dict[str, Any], strategy: str, inputs: Any, gradients: bool
) -> None:
    model, x = encoder(), normal(2, 6, 16)
    with torch.no_grad():
        expected = real(model(x, **inputs()))
        patched = apply_plan(model, plan(strategy, scopes))
    with torch.set_grad_enabled(gradients):
        assert close(real(patched(x, **inputs())).detach(), expected)


def test_every_module_inside_is_called() -> None:
    patched, seen = apply_plan(encoder(), plan("cast", ISLAND)), []
    island = patched.get_submodule("layers.1.linear2")
    inner = island.forward
    island.forward = lambda x: seen.append(x.dtype) or inner(x)  # type: ignore[func-returns-value]
    with torch.no_grad():
        patched(normal(2, 6, 16))
    assert seen == [torch.bfloat16]  # as the layer before hands it over; the scope raises it


def test_layers_without_a_scope_inside_stay_fused() -> None:
    patched = apply_plan(encoder(), plan("cast", ISLAND))
    assert patched.get_submodule("layers.0").activation_relu_or_gelu == 1
    assert patched.get_submodule("layers.1").activation_relu_or_gelu == 0


def test_another_plan_takes_the_mark_off() -> None:
    model = apply_plan(encoder(), plan("autocast", ISLAND))
    apply_plan(model, plan("autocast", {"": scope("bf16")}))
    before = encoder()
    for path, module in model.named_modules():
        ours = {key for key in vars(module) if key != "forward"}
        assert ours == set(vars(before.get_submodule(path)))
    assert model.get_submodule("layers.1").activation_relu_or_gelu == 1
    assert model.use_nested_tensor is True


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_not_fused_either(copied: Any) -> None:
    patched, x = apply_plan(encoder(), plan("cast", ISLAND)), normal(2, 6, 16)
    with torch.no_grad():
        assert torch.equal(copied(patched)(x), patched(x))


@pytest.mark.slow
def test_compiled_and_exported_whole() -> None:
    patched, x = apply_plan(encoder(), plan("cast", ISLAND)), normal(2, 6, 16)
    with torch.no_grad():
        expected = patched(x)
        assert close(torch.compile(patched, fullgraph=True, backend="aot_eager")(x).float(), expected.float())
        assert close(torch.export.export(patched, (x,)).module()(x).float(), expected.float())
