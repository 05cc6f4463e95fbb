"""A model stored in FP16 or BF16, raised for as long as it is audited: what is raised, and that it comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import AuditorError, LoadError
from auditor.features.training.objective import training_subject
from auditor.isolation import in_eval
from auditor.isolation.isolated import in_fp32
from auditor.loading import from_object, load
from auditor.loading.placement import copy_to_device, move_subject, place_subject
from auditor.loading.state import upcast_model
from tests.support.capturing import Function
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.subjects import normal, subject_of

BF16 = torch.bfloat16


def hard(model: Model, x: Tensor) -> Tensor:
    """Casts to BF16, whatever the weights are stored in."""
    return model.low(x.bfloat16()).float()


def looks_up(model: Model, x: Tensor) -> Tensor:
    """Multiplies with a table that is no buffer."""
    return model.low(x @ model.tables[0])


def low() -> nn.Linear:
    return nn.Linear(4, 4).bfloat16()


CASES: dict[str, tuple[Callable[[], nn.Module], torch.dtype, str]] = {
    "nothing is low": (lambda: nn.Linear(4, 4), torch.float32, "none"),
    "FP64 is not": (lambda: nn.Linear(4, 4).double(), torch.float64, "none"),
    "its inputs are, and it casts them": (lambda: Model(lambda m, x: m.a(x.float()), a=nn.Linear(4, 4)), BF16, "none"),
    "its inputs are, and it does not": (lambda: nn.Linear(4, 4), BF16, "inputs"),
    "all of it": (low, BF16, "weights"),
    "a part": (
        lambda: Model(lambda m, x: m.last(m.low(x.to(m.low.weight.dtype)).float()), low=low(), last=nn.Linear(4, 4)),
        BF16,
        "weights",
    ),
    "a buffer": (lambda: Model(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(4).half().float()), torch.float32, "none"),
    "tables beside it": (lambda: Model(looks_up, low=low(), tables=[torch.ones(4, 4, dtype=BF16)]), BF16, "attributes"),
    "a part that it casts to": (
        lambda: Model(lambda m, x: m.last(hard(m, x)), low=low(), last=nn.Linear(4, 4)),
        BF16,
        "kept",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_raised(case: str) -> None:
    build, dtype, expected = CASES[case]
    model, x = build(), torch.ones(2, 4, dtype=dtype)
    found = from_object(model, x)
    assert found.upcast == expected
    assert (found.batches[0][0][0].dtype is torch.float32) == (
        dtype is torch.float32 or expected not in ("none", "kept")
    )
    assert len(found.warnings) == (expected != "none")
    with upcast_model(found):
        model.eval()(*found.batches[0][0])


def test_what_was_low_comes_back_on_its_own_memory() -> None:
    model = Model(looks_up, low=low(), tables=[torch.ones(4, 4, dtype=BF16)])
    model.low.weight.grad = torch.ones(4, 4, dtype=BF16)
    tensors = [model.low.weight, model.low.bias, model.tables[0], model.low.weight.grad]
    memory = [(id(x), x.data_ptr(), x.dtype, x.clone()) for x in tensors]
    with in_fp32(model, "attributes"):
        assert model.low.weight.dtype is model.tables[0].dtype is torch.float32
        model(torch.ones(2, 4)).sum().backward()
    now = [model.low.weight, model.low.bias, model.tables[0], model.low.weight.grad]
    for x, (identity, place, dtype, value) in zip(now, memory, strict=True):
        assert (id(x), x.data_ptr(), x.dtype) == (identity, place, dtype)
        assert torch.equal(x, value)
    assert model.low.bias.grad is None


def test_a_model_that_casts_to_what_all_of_it_is_stored_in_has_no_reference() -> None:
    with refused(LoadError, "low-precision-model", match="does not run when its weights are converted to FP32"):
        from_object(Model(hard, low=low()), torch.ones(2, 4))


# Models in hand, the first FP32 forward, and what it must leave alone.


def test_in_eval_restores_after_an_error():
    class Fails(nn.Sequential):
        def forward(self, x):
            assert not self.training
            raise KeyError

    model = Fails(nn.BatchNorm1d(3)).train()
    with pytest.raises(KeyError), in_eval(model):
        model(torch.ones(1))
    assert model.training
    assert model[0].training


@pytest.mark.parametrize(
    ("model", "value", "slug", "words"),
    [
        (Function(lambda x: {"y": x.log()}), -torch.ones(2), "nan-output", "returns NaN in FP32"),
        (nn.Linear(3, 4), torch.ones(2, 5), "forward-raises", "on inputs float32[2, 5] from example_inputs"),
        (nn.Linear(3, 4), torch.ones(2, 3, dtype=torch.float64), "forward-raises", "float64[2, 3]"),
        (nn.Linear(3, 4, device="meta"), torch.ones(2, 3), "meta-weights", "meta device"),
        (nn.Sequential(nn.LazyLinear(4)), torch.ones(2, 3), "lazy-weights", "0.weight"),
        (nn.Sequential(nn.LazyBatchNorm1d()), torch.ones(2, 3), "lazy-weights", "call the model once"),
        (torch.ones(2), torch.ones(2), "not-a-model", "got a Tensor"),
    ],
)
def test_models_that_cannot_be_audited(model, value, slug, words):
    with refused(LoadError, slug, words):
        from_object(model, value)


def test_held_out_inputs_that_do_not_fit_are_named_as_such(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\ndef get_model(): return torch.nn.Linear(3, 4)\n"
        "def get_inputs(): return torch.ones(2, 3)\ndef get_eval_inputs(): return torch.ones(2, 5)\n"
    )
    with refused(LoadError, "forward-raises", "on inputs float32[2, 5] from the held-out inputs: "):
        load(str(tmp_path / "net.py"))


# On a GPU a copy is audited: the caller's model must not be moved there, not even a part of it.


class Whole(nn.Linear):
    """Copies of it are the model itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        return self


class Part(nn.Linear):
    """Copies of it hold the weights of the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        twin = Part(self.in_features, self.out_features)
        twin.weight = self.weight
        return twin


class Refusing(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Refusing:
        raise TypeError("cannot pickle '_thread.lock' object")


@pytest.mark.parametrize("model_class", [Whole, Part, Refusing])
@pytest.mark.parametrize("inside", [False, True])
def test_models_that_cannot_be_copied_are_refused_before_they_are_moved(
    model_class: type[nn.Linear], inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.ReLU(), model_class(4, 2)) if inside else model_class(4, 2)
    moved: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "to", lambda self, device: moved.append(self) or self)
    with refused(AuditorError, "no-copy", match="device='cpu'"):
        place_subject(subject_of(model, normal(3, 4)), "meta")
    assert moved == []


def test_a_copy_is_the_same_model_of_other_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    twin = copy_to_device(model, "cpu")
    assert torch.equal(twin(normal(3, 4)), model(normal(3, 4)))
    ours = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
    assert not ours & {x.data_ptr() for x in (*twin.parameters(), *twin.buffers())}


def test_plain_tensors_and_what_a_loss_closes_over_are_moved_and_the_callers_are_not() -> None:
    class Held(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.shift, self.more = torch.ones(4), {"list": [torch.ones(2)], "pair": (torch.ones(2), "word")}

    model, weight = Held(), torch.ones(2)
    subject = training_subject(model, (normal(3, 4), normal(3, 2)), {}, lambda y, t: (weight * (y - t)).sum())
    twin = next(move_subject(subject, "meta"))
    assert isinstance(twin.model, Held)
    inside = [twin.model.shift, twin.model.more["list"][0], twin.model.more["pair"][0], twin.model.weight]
    assert {x.device.type for x in inside} == {"meta"}
    ones = torch.ones(3, 2, device="meta")
    assert twin.objective.loss_fn(ones, ones).device.type == "meta"
    ours = [model.shift, model.more["list"][0], model.more["pair"][0], model.weight, weight]
    assert {x.device.type for x in ours} == {"cpu"}
