"""Each piece of advice appears where its measurement asks for it, and not where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from auditor.numerics.histogram import magnitudes_of
from auditor.records.training import Training
from auditor.training.advice import advice_of, reduce_dtype
from auditor.training.objective import training_subject
from auditor.training.stage import MeasuredStep, conclude, prepare


class Lookup(nn.Module):
    """An embedding whose gradient is multiplied by `gain` on its way back; three layers behind it."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embed, self.gain = nn.Embedding(8, 4), gain
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x.detach() + self.gain * (x - x.detach())
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).mean(1)


def prepared_lookup(gain: float) -> MeasuredStep:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, tokens, targets = Lookup(gain), torch.randint(0, 8, (4, 3)), torch.randn(4, 2)
    return prepare(training_subject(model, (tokens, targets), {}, nn.MSELoss()), ("fp16", "bf16"), 0)


@pytest.fixture(scope="module")
def lookup() -> tuple[MeasuredStep, Training]:
    prepared = prepared_lookup(1.0)
    return prepared, conclude(prepared, {}, None, lambda name: None)


def codes(prepared: MeasuredStep, training: Training) -> set[str]:
    return {advice.code for advice in advice_of(training, prepared.capture)}


def test_master_weights_by_the_share_of_lost_updates(lookup: tuple[MeasuredStep, Training]) -> None:
    prepared, training = lookup
    assert training.bf16 is not None
    for share in (0.05, 0.2):
        outlook = replace(training.bf16, lost_adam={**training.bf16.lost_adam, 1e-3: share})
        assert ("master-weights" in codes(prepared, replace(training, bf16=outlook))) is (share > 0.1)
    assert "master-weights" not in codes(prepared, replace(training, bf16=None))


def test_eps_against_the_gradients(lookup: tuple[MeasuredStep, Training]) -> None:
    prepared, training = lookup
    tiny = tuple(replace(p, gradient=magnitudes_of(torch.full((10,), 1e-9))) for p in training.parameters)
    (advice,) = (a for a in advice_of(replace(training, parameters=tiny), prepared.capture) if a.code == "adam-eps")
    assert advice.evidence == {"squares_lost_fp16": 1.0, "below_eps": 1.0}


def test_clipping_and_reducing_speak_of_fp16_alone(lookup: tuple[MeasuredStep, Training]) -> None:
    prepared, training = lookup
    assert {"clip-after-unscale", "reduce-dtype"} <= codes(prepared, replace(training, format="fp16"))
    assert "clip-after-unscale" not in codes(prepared, replace(training, format="bf16"))
    assert "reduce-dtype" not in codes(prepared, replace(training, fp16=None))


def test_ranks_until_the_sum_overflows(lookup: tuple[MeasuredStep, Training]) -> None:
    prepared, training = lookup
    assert training.fp16 is not None
    one = replace(training.parameters[0], gradient=magnitudes_of(torch.tensor([2.0])))
    window = replace(training.fp16, init=1024.0)
    (advice,) = reduce_dtype(replace(training, parameters=(one,), fp16=window), prepared.capture)
    assert advice.evidence["ranks"] == 65504 / (2 * 1024)
