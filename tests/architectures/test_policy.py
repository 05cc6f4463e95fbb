"""The dtype that `resolve` computes for every operation of a public architecture is the one a run really has."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, plain
from auditor.execution.resolve import resolve
from tests.architectures.conftest import Audited

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_resolved_dtypes_are_those_of_a_run(audited: Audited, strategy: str, fmt: str) -> None:
    graph = audited.capture
    how = Policy(graph, strategy, plain(fmt), fmt)
    expected = resolve(how)
    seen: dict[str, str] = {}

    def observe(node: fx.Node, value: object) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if node.name in graph.nodes and tensors:
            seen[node.name] = NAMES.get(tensors[0].dtype, "")

    interpreter = Executor(graph.graph_module, how, observe)
    with torch.no_grad():
        interpreter.run(*graph.bind(audited.model, (audited.specimen.args, audited.specimen.kwargs)))
    assert {name: expected.dtypes[name] for name in seen} == seen
    assert any(dtype == fmt for dtype in seen.values())
