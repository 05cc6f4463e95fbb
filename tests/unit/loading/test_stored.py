"""A model stored in FP16 or BF16, raised for as long as it is audited: what is raised, and that it comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import LoadError
from auditor.loading import from_object
from auditor.loading.state import in_fp32, raised
from tests.support.subjects import Runs

BF16 = torch.bfloat16


def hard(model: Runs, x: Tensor) -> Tensor:
    """Casts to BF16, whatever the weights are stored in."""
    return model.low(x.bfloat16()).float()


def follows(model: Runs, x: Tensor) -> Tensor:
    return model.low(x.to(model.low.weight.dtype))


def looks_up(model: Runs, x: Tensor) -> Tensor:
    """Multiplies with a table that is no buffer."""
    return model.low(x @ model.tables[0])


def low() -> nn.Linear:
    return nn.Linear(4, 4).bfloat16()


CASES: dict[str, tuple[Callable[[], nn.Module], torch.dtype, str]] = {
    "nothing is low": (lambda: nn.Linear(4, 4), torch.float32, "none"),
    "FP64 is not": (lambda: nn.Linear(4, 4).double(), torch.float64, "none"),
    "its inputs are, and it casts them": (lambda: Runs(lambda m, x: m.a(x.float()), a=nn.Linear(4, 4)), BF16, "none"),
    "its inputs are, and it does not": (lambda: nn.Linear(4, 4), BF16, "inputs"),
    "all of it": (low, BF16, "weights"),
    "a part": (
        lambda: Runs(lambda m, x: m.last(follows(m, x).float()), low=low(), last=nn.Linear(4, 4)),
        BF16,
        "weights",
    ),
    "a buffer": (lambda: Runs(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(4).half().float()), torch.float32, "none"),
    "tables beside it": (lambda: Runs(looks_up, low=low(), tables=[torch.ones(4, 4, dtype=BF16)]), BF16, "attributes"),
    "a part that it casts to": (
        lambda: Runs(lambda m, x: m.last(hard(m, x)), low=low(), last=nn.Linear(4, 4)),
        BF16,
        "kept",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_raised(case: str) -> None:
    build, dtype, expected = CASES[case]
    model, x = build(), torch.ones(2, 4, dtype=dtype)
    found = from_object(model, x)
    assert found.raised == expected
    assert (found.batches[0][0][0].dtype is torch.float32) == (
        dtype is torch.float32 or expected not in ("none", "kept")
    )
    assert len(found.warnings) == (expected != "none")
    with raised(found):
        model.eval()(*found.batches[0][0])


def test_what_was_low_comes_back_on_its_own_memory() -> None:
    model = Runs(looks_up, low=low(), tables=[torch.ones(4, 4, dtype=BF16)])
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
    with pytest.raises(LoadError, match="does not run with the same values in FP32") as caught:
        from_object(Runs(hard, low=low()), torch.ones(2, 4))
    assert caught.value.slug == "low-precision-model"
    assert "\n" not in str(caught.value)
