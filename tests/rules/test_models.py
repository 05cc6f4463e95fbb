"""Whole models built with embeddings, collectives, linear algebra and recurrent layers: what is found in each, by module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from auditor.loading import from_object
from auditor.measure.measure import measure
from auditor.records import Finding
from auditor.rulebook.load import load_rules
from tests.capturing import captured
from tests.slow.agreement import Specimen, found_in

RULES = load_rules()


class LanguageModel(nn.Module):
    """Word and position tables, one encoder layer, an output layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(100, 16), nn.Embedding(8, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.norm, self.output = nn.LayerNorm(16), nn.Linear(16, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        ids = torch.arange(tokens.shape[1])
        return self.output(self.norm(self.body(self.words(tokens) + self.positions(ids))))


class RowParallel(nn.Module):
    """A linear layer whose inputs are split over ranks: each adds its share."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shard = nn.Linear(inputs // dist.get_world_size(), outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.all_reduce(self.shard(x), "sum", dist.group.WORLD)


class Reduced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.all_reduce(x + 1.0, "sum", dist.group.WORLD)


class TensorParallel(nn.Module):
    """A feed-forward block over the ranks of a process group, its result gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), RowParallel(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return functional.all_gather_tensor(self.down(self.up(x).relu()), 0, dist.group.WORLD) * 2.0


class Whitening(nn.Module):
    """Decorrelates its features by a Cholesky factor of their covariance."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(0)
        covariance = centred.t() @ centred / x.shape[0] + 1e-2 * torch.eye(x.shape[1], dtype=x.dtype)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), centred.t(), upper=False).t()


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.whiten, self.head = nn.Linear(8, 8), Whitening(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.whiten(self.stem(x)))


class Speech(nn.Module):
    """Convolutions over a spectrogram, an LSTM over its frames, a class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(8, 16, 3, padding=1)
        self.encoder = nn.LSTM(16, 16, batch_first=True)
        self.classes = nn.Linear(16, 24)

    def forward(self, frames: Tensor) -> Tensor:
        return self.classes(self.encoder(self.stem(frames).relu().transpose(1, 2))[0])


TOKENS = torch.arange(16).reshape(2, 8)

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, set[str]]]] = {
    "language model": (
        LanguageModel,
        lambda: TOKENS,
        {
            "BND003": {"words", "positions"},
            "BND002": {"output"},
            "BND001": set(),
            "NRM004": {"body.norm1", "body.norm2", "norm"},
        },
    ),
    "tensor parallel": (
        TensorParallel,
        lambda: torch.randn(4, 16),
        {"COL001": {"down"}, "COL002": {""}, "BND001": {"up"}, "BND002": {"down.shard"}},
    ),
    "whitening": (
        Features,
        lambda: torch.randn(32, 8),
        {"LIN001": {"whiten"}, "BND001": {"stem"}, "BND002": {"head"}},
    ),
    "speech": (
        Speech,
        lambda: torch.randn(1, 8, 65),
        {"RNN001": {"encoder"}, "BND001": {"stem"}, "HWR002": {"stem"}, "BND002": {"classes"}, "RNN004": set()},
    ),
}


@cache
def findings(name: str) -> tuple[Finding, ...]:
    """Found and measured, reproducibly."""
    build, inputs, _ = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        held = inputs()
        return found_in(Specimen(name, lambda: from_object(build(), (held,)), failing=False), RULES)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_in_a_model(name: str) -> None:
    found = findings(name)
    expected = MODELS[name][2]
    assert {code: {item.owner for item in found if item.rule == code} for code in expected} == expected


def test_the_measurement_bears_out_that_factorisations_have_no_half_kernel() -> None:
    factorised = [item for item in findings("whitening") if item.rule == "LIN001"]
    assert {item.op for item in factorised} == {"aten.linalg_cholesky.default", "aten.linalg_solve_triangular.default"}
    assert {(item.severity, item.agrees) for item in factorised} == {("error", True)}


class Recorded(TorchDispatchMode):
    """The operations that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_collective_is_waited_for_before_its_result_is_read() -> None:
    model, inputs = Reduced().eval(), (torch.full((2, 4), 3.0),)
    traced = captured(model, *inputs).capture
    with Recorded() as recorded:
        found = measure(traced, model, (inputs, {}), ("fp16", "bf16"))
    (name,) = (name for name, node in traced.nodes.items() if node.op.startswith("_c10d_functional.all_reduce"))
    assert found.ranges[name].max_abs == 4.0  # of one rank, 3 + 1
    after = {second for first, second in pairwise(recorded.names) if first == "_c10d_functional.all_reduce.default"}
    assert after == {"_c10d_functional.wait_tensor.default"}
