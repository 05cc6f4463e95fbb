"""The process that runs ONNX models, from the inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from onnx import TensorProto, helper, save

from auditor.verify.onnxruns import run_model
from auditor.verify.running import Answers


def saved(folder: Path, ends: int, op: str = "Add") -> Path:
    """A model that does one thing to an input and itself."""
    ports = [helper.make_tensor_value_info(name, ends, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op, ["x", "x"], ["y"])], "one", ports[:1], ports[1:])
    model: Any = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    save(model, folder / "one.onnx")
    return folder / "one.onnx"


def test_inputs_are_cast_to_what_the_model_takes_and_outputs_raised(tmp_path: Path) -> None:
    found = run_model(saved(tmp_path, TensorProto.FLOAT16), [((torch.tensor([1.0, 3e4]),), {})], {})
    assert isinstance(found, Answers)
    assert found.outputs[0][0].dtype is torch.float32
    assert found.outputs[0][0].tolist() == [2.0, 60000 // 32 * 32.0]


def test_what_has_no_kernel_is_a_reason(tmp_path: Path) -> None:
    found = run_model(saved(tmp_path, TensorProto.BFLOAT16, "Pow"), [((torch.ones(2),), {})], {})
    assert isinstance(found, str)
    assert "\n" not in found


def test_inputs_and_outputs_in_bf16_are_handed_over_where_there_are_kernels(tmp_path: Path) -> None:
    low, wide = TensorProto.BFLOAT16, TensorProto.FLOAT
    ports = [helper.make_tensor_value_info(name, low, ["n", 2]) for name in ("x", "y")]
    nodes = [
        helper.make_node("Cast", ["x"], ["raised"], to=wide),
        helper.make_node("Exp", ["raised"], ["grown"]),
        helper.make_node("Cast", ["grown"], ["y"], to=low),
    ]
    graph = helper.make_graph(nodes, "three", ports[:1], ports[1:])
    model: Any = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    save(model, tmp_path / "three.onnx")
    x = torch.tensor([[1.01, -2.0], [0.3, 5.0]]).T  # not contiguous
    found = run_model(tmp_path / "three.onnx", [((x,), {})], {})
    assert isinstance(found, Answers), found
    assert found.outputs[0][0].dtype is torch.float32
    assert torch.equal(found.outputs[0][0], x.bfloat16().float().exp().bfloat16().float())
