"""A patched model in the hands of torch: recomputed activations, fused transformer layers, and a plan applied for a while."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from auditor.artefact.applying import apply_plan, is_wrapped
from auditor.artefact.entrances import is_bound
from auditor.isolation import isolate
from tests.support.patching import PLANS, Net, identity, plan, scope, shared, versions
from tests.support.subjects import normal, seeded

both = pytest.mark.parametrize("name", PLANS)
reentrant = pytest.mark.parametrize("use_reentrant", [False, True])


class Checkpointed(Net):
    """The same network; a low layer, an FP32 island and a container with both are recomputed."""

    use_reentrant: bool | None = None

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for part in (self.first, self.norm, self.head):
            x = part(x) if self.use_reentrant is None else checkpoint(part, x, use_reentrant=self.use_reentrant)
        return x * scale + self.shift


def gradients(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    result = model(*args, **kwargs)
    output = result if isinstance(result, Tensor) else result.last_hidden_state
    output.float().square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@both
@reentrant
def test_gradients_are_those_without_checkpoints(name: str, use_reentrant: bool) -> None:
    x = normal(6, 4).requires_grad_()
    expected = gradients(apply_plan(seeded(Checkpointed), PLANS[name]).train(), x)
    model = apply_plan(seeded(Checkpointed), PLANS[name]).train()
    model.use_reentrant = use_reentrant
    recomputed: list[int] = []
    model.norm.register_forward_pre_hook(lambda *_: recomputed.append(1))
    found = gradients(model, x)
    assert len(recomputed) == 2  # forward, and again in the backward pass
    assert len(expected) == 8
    assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in expected.items()}
    assert all(torch.equal(found[key], expected[key]) for key in expected)


# PyTorch's transformer layers fuse their modules in eval mode without gradients; where a scope lies inside they must not.

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
        assert float((real(patched(x, **inputs())).detach() - expected).norm() / expected.norm()) < 0.02


def test_every_module_inside_is_called() -> None:
    patched, seen = apply_plan(encoder(), plan("cast", ISLAND)), []
    island = patched.get_submodule("layers.1.linear2")
    inner = island.forward
    island.forward = lambda x: seen.append(x.dtype) or inner(x)
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
        ours = {key for key, value in vars(module).items() if not is_bound(value)}
        assert ours == set(vars(before.get_submodule(path)))
    assert model.get_submodule("layers.1").activation_relu_or_gelu == 1
    assert model.use_nested_tensor is True


# A plan that is applied for a while leaves nothing behind: the same objects, the same storage, the same bits.


@contextmanager
def patched(model: nn.Module, plan: dict[str, Any]) -> Iterator[nn.Module]:
    with isolate(model):
        yield apply_plan(model, plan)


@both
def test_the_body_sees_what_apply_makes_and_nothing_stays(name: str) -> None:
    model, x = shared(), normal(2, 4, seed=3)
    expected = apply_plan(copy.deepcopy(model), PLANS[name])(x)
    before, written = identity(model), versions(model)
    with patched(model, PLANS[name]) as inside:
        assert inside is model
        assert is_wrapped(model)
        assert torch.equal(model(x), expected)
        assert model.first.weight is model.twin.weight
        assert (model.first.weight.dtype is torch.bfloat16) is (name == "cast")
    assert identity(model) == before
    assert versions(model) == written


@both
def test_gradients_that_are_on_their_way_arrive(name: str) -> None:
    model, twin, x = seeded(Net), seeded(Net), normal(2, 4)
    fired: list[Tensor] = []
    model.first.weight.register_post_accumulate_grad_hook(fired.append)
    loss = model(x).square().sum()
    with patched(model, PLANS[name]):
        model(x)
    loss.backward()
    twin(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    model(x).sum().backward()
    assert len(fired) == 2


def test_plans_that_do_not_fit() -> None:
    model = shared()
    before = identity(model)
    with pytest.raises(ValueError, match="nowhere"), patched(model, plan("cast", {"nowhere": scope("bf16")})):
        raise AssertionError("there is no body without a patched model")
    assert identity(model) == before
