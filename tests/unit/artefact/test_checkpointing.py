"""Activations that are computed again in the backward pass are computed in the same precision as the first time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from auditor.artefact.applying import apply_plan
from tests.support.patching import PLANS, Net, plan, scope
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


ROOM = 1e-4
"""A reentrant checkpoint under autocast sums the gradients of its inputs in another order, without a plan too (by 8e-6)."""


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.BertModel(config, add_pooling_layer=False).train()


@both
@reentrant
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing_of_transformers(name: str, use_reentrant: bool) -> None:
    islands = {f"encoder.layer.{i}.attention.output.LayerNorm": scope("fp32") for i in range(2)}
    chosen = plan(name, {"": scope("bf16"), **islands, "encoder.layer.1.output": scope("fp32")})
    tokens = torch.arange(12).reshape(2, 6)
    expected = gradients(apply_plan(bert(), chosen), tokens)
    model = apply_plan(bert(), chosen)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls: list[int] = []
    model.encoder.layer[1].output.register_forward_pre_hook(lambda *_: calls.append(1))
    found = gradients(model, tokens)
    assert len(calls) == 2
    assert found.keys() == expected.keys()
    whole = torch.cat([value.flatten() for value in expected.values()]).norm()
    for key, value in expected.items():
        assert float((found[key] - value).norm()) <= ROOM * float(whole), key
