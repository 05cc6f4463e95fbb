"""One model written flat, what was measured of it and what torch.export makes of it, once for all tests of the room."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.features.programs.exported import ExportedModel, export_model
from auditor.features.programs.operations import GraphOperation, Table, Value, table_of
from auditor.plan.context import PlanningContext
from auditor.records import Audit
from auditor.records.paths import FP32_OUTPUT
from tests.support.planning import planning_of


@pytest.fixture(scope="session")
def planning() -> PlanningContext:
    return planning_of(flat(), torch.randn(4, 16), formats=("fp16",))


@pytest.fixture(scope="session")
def graph(planning: PlanningContext) -> ExportedModel:
    return export_model(planning.subject.model, planning.subject.batches[0])


@pytest.fixture(scope="session")
def table(planning: PlanningContext, graph: ExportedModel) -> Table:
    return table_of(graph.graph_module.graph, "fp16", planning)


@pytest.fixture(scope="session")
def audit() -> Audit:
    torch.manual_seed(0)
    x, asked = torch.randn(4, 16), {"evaluate": close_answers, "max_drop": 0.05}
    return auditor.audit(flat(), x, strategies=("autocast", "graph"), device="cpu", **asked)


@pytest.fixture
def model() -> nn.Module:
    return flat()


# Models that are exported, and tables that the solver is tried on.


class Flat(nn.Module):
    """Everything in one forward; the square of 1000 is beyond FP16, and the mean of such squares too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        wide = torch.relu(self.first(x))
        size = ((1000 * wide) ** 2).mean(-1, keepdim=True).sqrt() / 1000
        narrow = self.second(wide / (size + 0.1))
        return {"scores": narrow, "likely": narrow.softmax(-1)}


def flat() -> nn.Module:
    torch.manual_seed(1)
    return Flat().eval()


SCORED = torch.linspace(-2, 2, 64 * 16).reshape(64, 16).sin()


def close_answers(net: nn.Module) -> Iterator[Tensor]:
    """Which samples are answered to within a thousandth of their size."""
    assert next(net.eval().parameters()).device.type == "cpu"
    with torch.no_grad():
        for x, y in zip(SCORED.split(16), flat()(SCORED)["scores"].split(16), strict=True):
            yield (net(x)["scores"].float() - y).norm(dim=1) <= 1e-3 * y.norm(dim=1)


def drawn(rnd: random.Random, count: int) -> Table:
    """A graph of so many operations at random: values read by several, weights, operations that give two or none, or
    one that may be FP32 if the operation is low."""
    operations: dict[str, GraphOperation] = {}
    values: dict[str, Value] = {}
    for index in range(rnd.randint(1, 3)):
        name = f"weight_{index}"
        values[name] = Value(name, None, 0.3 * rnd.random(), 0.2 * rnd.random(), stored=rnd.random() < 0.6)
    for index in range(count):
        name, known = f"operation_{index}", list(values)
        reads = tuple(dict.fromkeys(rnd.choice(known) for _ in range(rnd.randint(1, 3))))
        high = rnd.random()
        operations[name] = made(
            name, reads, high * rnd.choice([0.5, 1.2]), high, 0.3 * rnd.random(), rnd.random() < 0.15
        )
        maker, results = name, rnd.choice([0, 1, 1, 2])
        if results == 1 and rnd.random() < 0.4:
            maker = f"{name}{FP32_OUTPUT}"
            operations[maker] = made(maker, (), 0.0, 0.2 * rnd.random(), 0.3 * rnd.random(), rnd.random() < 0.15)
        for which in range(results):
            given = f"value_{index}_{which}"
            share = 0.2 * rnd.random(), 0.1 * rnd.random()
            values[given] = Value(given, maker, *share, returned=rnd.random() < 0.2)
    return Table("fp16", operations, values)


def made(
    name: str, reads: tuple[str, ...], low: float, high: float, error: float = 0.0, kept: bool = False
) -> GraphOperation:
    return GraphOperation(
        name, "aten.made.up", reads, low, high, error, 1, None, *(("unsafe", "unsafe: so it was drawn") if kept else ())
    )
