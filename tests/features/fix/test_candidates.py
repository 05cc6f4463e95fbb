"""What is proposed at an expression, in the places where people write expressions."""

import ast
from pathlib import Path

import pytest
import torch

from auditor.features.fix.candidates import Proposer
from auditor.features.fix.records import Kinds, Promotion
from auditor.features.fix.source import Source
from auditor.features.fix.worker import _KindTracer
from auditor.loading.importer import import_source

X, Y = "x", "y"


def proposer_of(text: str, *names: tuple[int, str]) -> Proposer:
    """A Proposer for a text. names: (first line of a function, lambda or comprehension, its variable that is a tensor)."""
    kinds: Kinds = {("m.py", line, name): "float" for line, name in names}
    return Proposer(Source("m.py", text), kinds)


def node_of(proposer: Proposer, text: str) -> ast.expr:
    nodes = [one for one in ast.walk(proposer.source.tree) if isinstance(one, ast.expr)]
    return next(one for one in nodes if ast.unparse(one) == text)


def in_fp32(proposer: Proposer, text: str) -> list[str]:
    """The edited texts of the candidates that compute an expression in FP32."""
    return [proposer.source.apply(one.edits) for one in proposer.in_fp32(node_of(proposer, text))]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (
            "ACTS = {\n    'loud': lambda x: torch.exp(x) * 1e-4,\n}\n",
            (2, X),
            "lambda x: (torch.exp(x.float()) * 1e-4).to(x.dtype),",
        ),
        (
            "def f(xs):\n    return torch.cat([torch.exp(x) * 1e-4 for x in xs], -1)\n",
            (2, X),
            "torch.cat([(torch.exp(x.float()) * 1e-4).to(x.dtype) for x in xs], -1)",
        ),
        (
            "def f(x):\n    if (m := torch.exp(x)).numel(): return m\n",
            (1, X),
            "if (m := torch.exp(x.float()).to(x.dtype)).numel(): return m",
        ),
    ],
    ids=["lambda", "comprehension", "condition"],
)
def test_fp32_where_no_statement_can_follow(text: str, name: tuple[int, str], expected: str) -> None:
    proposer = proposer_of(text, name)
    assert any(expected in one for one in in_fp32(proposer, "torch.exp(x)"))


def test_an_argument_with_a_keyword_is_part_of_its_call() -> None:
    proposer = proposer_of("def f(x):\n    return g(h=torch.exp(x)) + 1\n", (1, X))
    assert any("return g(h=torch.exp(x.float())).to(x.dtype) + 1" in one for one in in_fp32(proposer, "torch.exp(x)"))


def test_a_small_factor_is_cast_back_instead_of_the_product() -> None:
    text = "def f(x, y):\n    m = x.square().mean(-1)\n    return y * torch.rsqrt(m) * 50\n"
    proposer = proposer_of(text, (1, X), (1, Y), (1, "m"))
    expected = "    m = x.float().square().mean(-1)\n    return y * torch.rsqrt(m).to(x.dtype) * 50\n"
    assert any(one.endswith(expected) for one in in_fp32(proposer, "x.square()"))


def test_a_region_without_autocast_keeps_tabs_line_ends_and_blank_lines() -> None:
    text = "def f(x):\r\n\ts = x @ x\r\n\r\n\treturn s - s.mean()\r\n"
    proposer = proposer_of(text, (1, X), (1, "s"))
    header = "\twith torch.autocast(x.device.type, enabled=False):\r\n"
    found = [one for one in in_fp32(proposer, "x @ x") if header in one]
    assert f"def f(x):\r\n{header}\t\ts = x.float() @ x.float()\r\n\r\n\t\treturn s - s.mean()\r\n" in found
    assert all("\n" not in one.replace("\r\n", "") for one in found)


def test_a_keyword_follows_an_argument_in_brackets_and_a_comment() -> None:
    text = "def f(x):\n    return x + torch.zeros(\n        (x.shape[0]),\n        (3),  # (three)\n    )\n"
    proposer = proposer_of(text, (1, X))
    found = [
        proposer.source.apply(one.edits)
        for one in proposer.without_upcast(node_of(proposer, "x + torch.zeros(x.shape[0], 3)"))
    ]
    assert "        (3), dtype=x.dtype,  # (three)\n" in found[0]


def test_a_promotion_in_a_lambda() -> None:
    proposer = proposer_of("f = lambda x: x * TABLE\n", (1, X))
    found = [proposer.source.apply(one.edits) for one in proposer.at_promotion(Promotion("m.py", 1, (X,)))]
    assert "f = lambda x: (x * TABLE).to(x.dtype)\n" in found


def test_only_the_part_of_a_tensor_that_is_read_is_converted() -> None:
    text = "def f(x):\n    s = 0\n    for t in range(x.shape[1]):\n        s = s + x[:, t] * 0.5\n    return s\n"
    found = in_fp32(proposer_of(text, (1, X)), "x[:, t] * 0.5")
    assert any("s = s + x[:, t].float() * 0.5\n" in one for one in found)
    assert not any("x.float()" in one for one in found)


def test_a_name_that_is_assigned_is_no_value() -> None:
    proposer = proposer_of("def f(x):\n    return (y := x.exp()) + 1\n", (1, X), (1, Y))
    assert not any(".float() :=" in one for one in in_fp32(proposer, "(y := x.exp()) + 1"))


NAMES = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(Block())

    def forward(self, batch, more):
        h = F.linear(batch["x"], self.block[0].proj.weight)
        return h * more[0] + batch["mask"].sum()
"""


def traced(folder: Path) -> tuple[Proposer, Kinds]:
    """A Proposer for a model in a file, with the kinds that a run of it shows."""
    file = folder / "named.py"
    file.write_text(NAMES)
    model = import_source("named", file).Net()
    batch = {"x": torch.ones(2, 4), "mask": torch.ones(2, dtype=torch.int64)}
    with _KindTracer() as tracer:
        model(batch, [torch.ones(4)])
    return Proposer(Source.read(str(file)), tracer.kinds), tracer.kinds


def test_weights_of_inner_modules_and_entries_of_dicts_are_tensors(tmp_path: Path) -> None:
    proposer, kinds = traced(tmp_path)
    known = {name: kind for (_, _, name), kind in kinds.items()}
    assert known["self.block[0].proj.weight"] == "float"
    assert known["self.block[0].proj"] == "layer"
    assert (known["batch['x']"], known["batch['mask']"], known["more[0]"]) == ("float", "int", "float")
    found = in_fp32(proposer, "F.linear(batch['x'], self.block[0].proj.weight)")
    expected = """h = F.linear(batch["x"].float(), self.block[0].proj.weight.float()).to(batch["x"].dtype)"""
    assert any(expected in one for one in found)
