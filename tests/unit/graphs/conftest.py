"""One model written flat, what was measured of it and what torch.export makes of it, once for all tests of the room."""

import pytest
import torch
from torch import nn

import auditor
from auditor.graphs.exported import ExportedModel, export_model
from auditor.graphs.operations import Table, table_of
from auditor.plan.workbench import Workbench
from auditor.records import Audit
from tests.support.planning import bench_of
from tests.unit.graphs.models import flat


@pytest.fixture(scope="session")
def bench() -> Workbench:
    torch.manual_seed(0)
    return bench_of(flat(), torch.randn(4, 16), formats=("fp16",))


@pytest.fixture(scope="session")
def graph(bench: Workbench) -> ExportedModel:
    return export_model(bench.subject.model, bench.subject.batches[0])


@pytest.fixture(scope="session")
def table(bench: Workbench, graph: ExportedModel) -> Table:
    return table_of(graph.graph_module.graph, "fp16", bench)


@pytest.fixture(scope="session")
def audit() -> Audit:
    torch.manual_seed(0)
    return auditor.audit(flat(), torch.randn(4, 16), strategies=("autocast", "graph"), device="cpu")


@pytest.fixture
def model() -> nn.Module:
    return flat()
