"""A plan for a bare model holds for the wrapped one, and the other way; otherwise one sentence says what differs."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import auditor
from auditor.errors import PlanError
from auditor.records import Audit
from tests.support.refusing import refused
from tests.support.subjects import normal, seeded


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[b, 3] of [b, 8]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lit(nn.Module):
    """A module that a training library puts around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Net)

    def forward(self, x: Tensor) -> Tensor:
        """The model's result."""
        return self.net(x)


def net() -> nn.Module:
    return seeded(Net).eval()


def each_block(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = net()
    model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
    return model.eval()


def normed() -> nn.Module:
    model = net()
    parametrizations.weight_norm(model.head, "weight")
    return model.eval()


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "torch.compile": lambda: torch.compile(net(), backend="eager"),
    "DataParallel": lambda: nn.DataParallel(net()).eval(),
    "blocks in torch.compile": lambda: each_block(lambda block: torch.compile(block, backend="eager")),
    "blocks in checkpoint_wrapper": lambda: each_block(checkpoint_wrapper),
}

X = normal(4, 8)


def audited(model: nn.Module) -> Audit:
    options = {"formats": "bf16", "strategies": "cast", "quick": True, "device": "cpu", "max_error": 0.05}
    return auditor.audit(model, X, **options)


@pytest.fixture(scope="module")
def bare() -> Audit:
    return audited(net())


@pytest.fixture(scope="module")
def folder(bare: Audit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plan")
    bare.save(place)
    return place


def dtypes(model: nn.Module) -> list[torch.dtype]:
    return [parameter.dtype for parameter in model.parameters()]


@pytest.mark.parametrize("name", WRAPPED)
def test_a_plan_for_the_bare_model_holds_for_the_wrapped_one(name: str, bare: Audit, folder: Path) -> None:
    expected = dtypes(auditor.apply(net(), bare))
    assert torch.bfloat16 in expected
    assert dtypes(auditor.apply(WRAPPED[name](), bare)) == expected
    patched = SimpleNamespace(**runpy.run_path(str(folder / "patched_model.py")))
    model = patched.apply(WRAPPED[name]())
    assert dtypes(model) == expected
    with torch.no_grad():
        assert model(X).dtype is auditor.apply(net(), bare)(X).dtype


@pytest.mark.parametrize("name", ["torch.compile", "blocks in checkpoint_wrapper"])
def test_a_plan_for_the_wrapped_model_holds_for_the_bare_one(name: str, bare: Audit) -> None:
    audit = audited(WRAPPED[name]())
    assert dtypes(auditor.apply(net(), audit)) == dtypes(auditor.apply(WRAPPED[name](), audit))
    assert dtypes(auditor.apply(net(), audit)) == dtypes(auditor.apply(net(), bare))


ADVICE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a module around it": (Lit, "it fits 'net' in this model: apply it to this module"),
    "a parametrization": (normed, "'head' has a parametrization of its weight: apply the plan before"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_error_says_to_what_the_plan_applies(name: str, bare: Audit, folder: Path) -> None:
    build, said = ADVICE[name]
    with refused(PlanError, "plan-mismatch", match=said):
        auditor.apply(build(), bare)
    patched = SimpleNamespace(**runpy.run_path(str(folder / "patched_model.py")))
    with pytest.raises(ValueError, match=said):
        patched.apply(build())


def test_a_plan_for_a_module_around_the_model_names_its_prefix() -> None:
    with refused(PlanError, "plan-mismatch", match=r"names begin with 'net\.'"):
        auditor.apply(net(), audited(seeded(Lit).eval()))


def test_an_adapter_of_peft_is_named_both_ways(bare: Audit) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        return peft.get_peft_model(net(), peft.LoraConfig(r=2, target_modules=["head"])).eval()

    with refused(
        PlanError, "plan-mismatch", match="This model has an adapter of PEFT at its root: apply the plan before"
    ):
        auditor.apply(adapted(), bare)
    auditor.apply(adapted().merge_and_unload(), bare)
    with refused(PlanError, "plan-mismatch", match="The plan's model has an adapter of PEFT"):
        auditor.apply(net(), audited(adapted()))


def test_a_plan_may_be_applied_before_an_adapter_is_added(bare: Audit) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(auditor.apply(net(), bare), peft.LoraConfig(r=2, target_modules=["head"])).eval()
    with torch.no_grad():
        result = model(X)
        expected = net()(X)
    assert (result.float() - expected).norm() <= 0.05 * expected.norm()
