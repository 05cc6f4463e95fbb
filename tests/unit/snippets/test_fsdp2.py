"""The snippet for FSDP2, run on the CPU with gloo: the sharded model computes what the patched one does, and trains."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from auditor.artefact.applying import apply_plan
from auditor.snippets import snippet
from tests.support.patching import Net, plan, scope
from tests.support.replaying import Model
from tests.support.small_models import tied
from tests.support.snippets import document, pasted
from tests.support.subjects import normal, seeded

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of this process alone; tests/unit/artefact/test_distributed.py has two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Deep(Net):
    """An island that holds no parameter, and a head in it that is low again."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Softmax(-1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(self.act(x) * 4, scale)


SCOPES = {"": "low", "act": "fp32", "norm": "fp32", "head": "fp32", "head.0": "low"}


def scopes_in(fmt: str) -> dict[str, dict[str, str]]:
    return {path: scope("fp32" if kept == "fp32" else fmt) for path, kept in SCOPES.items()}


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("root", ["low", "fp32"])
def test_a_cast_plan_shards_into_its_scopes(fmt: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = {**scopes_in(fmt), "": scope(fmt if root == "low" else "fp32")}
    if root == "fp32":
        scopes |= {"first": scope(fmt)}
    name, x = f"cast_{fmt}", normal(6, 4)
    shard = pasted(snippet(document({name: scopes}, name), "fsdp2"), monkeypatch)["shard"]
    model = shard(seeded(Deep), blocks=["head.2"])
    output = model(x)
    with torch.no_grad():
        expected = apply_plan(seeded(Deep), plan("cast", scopes, fmt))(x)
    assert torch.equal(output, expected)
    assert output.dtype is expected.dtype
    output.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # the shards


def test_an_autocast_plan_gathers_in_fp32_and_autocast_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = {"": scope("bf16"), "norm": scope("fp32")}
    text = snippet(document({"autocast_bf16": scopes}, "autocast_bf16"), "fsdp2")
    shard = pasted(text, monkeypatch, seeded(Net), {"autocast_bf16": scopes})["shard"]
    model = shard(seeded(Net), blocks=["first", "head"])
    output = model(normal(6, 4))
    assert torch.equal(output, apply_plan(seeded(Net), plan("autocast", scopes))(normal(6, 4)))
    output.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_a_weight_tied_across_scopes_is_said_to_be_out_of_reach() -> None:
    split = document({"cast_bf16": {"": scope("bf16"), "head": scope("fp32")}}, "cast_bf16", tied(5, 4))
    text = snippet(split, "fsdp2")
    assert all(line.startswith("#") for line in text.splitlines())
    assert "'embed.weight' and 'head.weight' are one weight" in text
    together = document({"cast_bf16": {"": scope("bf16")}}, "cast_bf16", tied(5, 4))
    assert "def shard" in snippet(together, "fsdp2")


def twice() -> nn.Module:
    one = nn.Linear(4, 4)
    return Model(lambda m, x: m.last(m.two(m.one(x))), one=one, two=one, last=nn.Linear(4, 2))


def test_a_shared_module_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = {"": scope("bf16"), "one": scope("fp32"), "two": scope("fp32")}
    text = snippet(document({"cast_bf16": scopes}, "cast_bf16", twice()), "fsdp2")
    model = pasted(text, monkeypatch)["shard"](seeded(twice))
    assert torch.equal(model(normal(2, 4)), apply_plan(seeded(twice), plan("cast", scopes))(normal(2, 4)))
