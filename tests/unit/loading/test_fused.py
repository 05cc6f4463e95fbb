"""Where PyTorch's fused transformer path answers otherwise than what is audited, the audit says so, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.isolation.answer import answer
from auditor.loading import cautions, from_object
from auditor.loading.fused import otherwise
from tests.subjects import normal, seeded

CLOSED = "the audit leaves that path closed"


class Encoder(nn.Module):
    """One layer, and a mask that is added to its scores, or one of entries that are hidden."""

    def __init__(self, mask: Tensor | None, hidden: Tensor | None = None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True)
        self.mask, self.hidden = mask, hidden

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.encoder(x, mask=self.mask, src_key_padding_mask=self.hidden)
        return found


def notes(model: nn.Module) -> list[str]:
    """Of those that an audit hands on as they are."""
    return [words for words in cautions(from_object(model, normal(2, 6, 16))) if CLOSED in words]


def fused(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(normal(2, 6, 16))
    return found


def plain(model: nn.Module) -> Tensor:
    found: Tensor = model.eval()(normal(2, 6, 16))
    return found.detach()


def test_what_is_nan_on_the_fused_path_alone_is_told() -> None:
    model = seeded(lambda: Encoder(normal(6, 6)))
    assert fused(model).isnan().any() and not plain(model).isnan().any()
    (note,) = notes(model)
    assert "returns NaN there" in note
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(fused(model), plain(model))
        assert not notes(model)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_other_numbers_are_told_with_their_error() -> None:
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[0, 3:] = True
    model = seeded(lambda: Encoder(None, hidden))
    (note,) = notes(model)
    error = (fused(model) - plain(model)).norm() / plain(model).norm()
    assert f"by {error:.2g} of what is audited" in note


@pytest.mark.parametrize(
    "make",
    [
        lambda: Encoder(None),
        lambda: Encoder(nn.Transformer.generate_square_subsequent_mask(6)),
        lambda: nn.Linear(16, 4),
    ],
    ids=["no mask", "causal", "no transformer"],
)
def test_nothing_is_said_where_both_answer_the_same(make: type[nn.Module]) -> None:
    model = seeded(make)
    torch.testing.assert_close(fused(model), plain(model))
    assert not notes(model)


def test_a_model_that_answers_otherwise_each_time_is_not_laid_to_the_path() -> None:
    numbers = (n for n in range(1, 100))  # which nothing puts back

    class Counts(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(numbers)

    model = seeded(lambda: Counts(None))
    batch = (normal(2, 6, 16),), {}
    assert otherwise(model.eval(), batch, answer(model.eval(), batch)) is None
