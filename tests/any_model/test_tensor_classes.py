"""Tensors of a class of their own that takes few operations: inside of a model they are audited, returned they are refused."""

import pytest
from torch import Tensor
from torch.masked import masked_tensor

import auditor
from auditor.errors import LoadError
from tests.any_model.holding import held
from tests.support.refusing import refused
from tests.support.replaying import Model, linear
from tests.support.subjects import normal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def inside(m: Model, x: Tensor) -> Tensor:
    hidden = m.first(x)
    return masked_tensor(hidden, x > 0).sum(-1).to_tensor(0.0)


def test_a_masked_tensor_inside_of_a_model() -> None:
    held(lambda: (Model(inside, first=linear(8, 8)).eval(), ((normal(4, 8),), {})))


@pytest.mark.parametrize("returned", [True, False])
def test_a_masked_tensor_that_is_taken_or_returned_is_refused_in_one_line(returned: bool) -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        return masked_tensor(m.first(x), x > 0) if returned else m.first((x * 2).to_tensor(0.0))

    x = normal(4, 8)
    given = x if returned else masked_tensor(x, x > 0)
    with refused(LoadError, "tensor-class", match=r"MaskedTensor.*plain tensors"):
        auditor.audit(Model(forward, first=linear(8, 8)).eval(), (given,), device="cpu")
