"""A helper's line, and the forward that called it, in everything that an audit of it says."""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit, Finding
from auditor.report.annotations import place_of
from auditor.report.findings import causes
from auditor.report.model_explorer import graph
from auditor.report.reporters import html, markdown, sarif, text
from auditor.report.table import table

HELPERS = """\
def scale(x):
    return x.square().mean(-1, keepdim=True)


def unit(x):
    return x / (scale(x) + 1e-16).sqrt()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> tuple[Audit, Finding, str]:
    """An audit, its finding about the helper's 1e-16, and what should stand beside that line."""
    folder = tmp_path_factory.mktemp("helpers")
    (folder / "unit_helpers.py").write_text(HELPERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        helpers = importlib.import_module("unit_helpers")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return helpers.unit(self.layer(x))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).index_fill(0, torch.tensor(0), 0.0)
    audit = auditor.audit(Net(), x)
    line = inspect.getsourcelines(Net.forward)[1] + 1
    finding = next(f for f in audit.findings if f.source == "unit_helpers.py:6")
    return audit, finding, f"{Path(__file__).name}:{line} in Net.forward"


def test_every_reporter_shows_both(found: tuple[Audit, Finding, str]) -> None:
    audit, _, beside = found
    both = f"unit_helpers.py:6 (from {beside})"
    for rendered in (text(audit), html(audit), audit._repr_html_(), sarif(audit)):
        assert both in " ".join(rendered.split())  # a terminal breaks lines
    assert both.replace("_", "\\_") in markdown(audit) or both in markdown(audit)
    assert both in table(audit)["strings"]
    assert both in json.dumps(graph(audit))


def test_code_scanning_gets_the_helpers_line_and_a_link_to_the_call(found: tuple[Audit, Finding, str]) -> None:
    audit, _, beside = found
    results = json.loads(sarif(audit))["runs"][0]["results"]
    result = next(r for r in results if r["locations"][0]["physicalLocation"]["region"]["startLine"] == 6)
    (related,) = result["relatedLocations"]
    assert related["physicalLocation"]["artifactLocation"]["uri"].endswith(Path(__file__).name)
    assert related["physicalLocation"]["region"]["startLine"] == int(beside.partition(" in ")[0].rpartition(":")[2])
    assert related["message"]["text"] == "called from Net.forward"


def test_a_finding_in_an_installed_package_lies_where_that_is_called(found: tuple[Audit, Finding, str]) -> None:
    """What is installed is in no repository; the call is."""
    from dataclasses import replace

    audit, finding, beside = found
    inside = "/env/lib/python3/site-packages/unit_helpers.py"
    nodes = tuple(replace(r, node=replace(r.node, source_path=inside)) for r in audit.nodes)
    line = int(beside.partition(" in ")[0].rpartition(":")[2])
    audit = replace(audit, nodes=nodes)
    place = next(place_of(audit, cause) for cause in causes(audit).all if finding in cause.members)
    assert (Path(place.file).name, place.line) == (Path(__file__).name, line)
