"""The snippet for ONNX converters, run on what torch.onnx exports and through a real converter."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from auditor.snippets import snippet
from tests.patching import Net, scope
from tests.snippets import document, pasted
from tests.subjects import normal, seeded

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

SCOPES = {"": scope("fp16"), "norm": scope("fp32"), "head.2": scope("fp32")}


def export(model: nn.Module, args: tuple[torch.Tensor, ...], file: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, args, file, dynamo=True, verbose=False)
    return str(file)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    return export(seeded(Net), (normal(2, 4),), tmp_path_factory.mktemp("onnx") / "net.onnx")


def code(scopes: dict[str, dict[str, str]], name: str = "cast_fp16", model: nn.Module | None = None) -> str:
    return snippet(document({name: scopes}, name, model), "onnx")


def test_names_are_those_in_the_exported_graph(exported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {node.name: node.op_type for node in onnx.load(exported).graph.node}
    found = pasted(code(SCOPES), monkeypatch)["names_to_exclude"](exported)
    assert [nodes[name] for name in found] == ["LayerNormalization", "Gemm"]
    rest = {"": scope("fp32"), "norm": scope("fp16"), "head": scope("fp16"), "head.2": scope("fp32")}
    found = pasted(code(rest), monkeypatch)["names_to_exclude"](exported)
    assert [nodes[name] for name in found] == ["Gemm", "Gemm", "Add"]  # first, head.2, the root's own


def test_a_converter_keeps_the_weights_of_the_islands(exported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxconverter_common")
    low = pasted(code(SCOPES), monkeypatch)["convert_with_onnxconverter_common"](exported)
    types = {tensor.name: tensor.data_type for tensor in low.graph.initializer}
    full, half = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    expected = dict.fromkeys(("norm.weight", "norm.bias", "head.2.weight", "head.2.bias"), full)
    expected |= dict.fromkeys(("first.weight", "first.bias", "head.0.weight", "head.0.bias", "shift"), half)
    assert {name: types[name] for name in expected} == expected
    from onnx.reference import ReferenceEvaluator

    x = normal(2, 4)
    (answer,) = ReferenceEvaluator(low).run(None, {low.graph.input[0].name: x.numpy()})
    with torch.no_grad():
        reference = seeded(Net)(x).numpy()
    assert answer.dtype == np.float32
    assert 0 < np.linalg.norm(answer - reference) / np.linalg.norm(reference) < 2e-3


class Twice(nn.Module):
    """One layer in two places, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = self.one
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.two(self.one(x)))


def test_both_calls_of_a_shared_module_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter calls the second one by its other name, which the plan does not list."""
    model = seeded(Twice)
    file = export(model, (normal(2, 4),), tmp_path / "twice.onnx")
    text = code({"": scope("fp16"), "one": scope("fp32")}, model=model)
    assert pasted(text, monkeypatch)["names_to_exclude"](file) == ["node_linear", "node_linear_1"]


def test_a_graph_without_modules_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name="relu")
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    file = str(tmp_path / "bare.onnx")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", value[:1], value[1:])), file)
    with pytest.raises(ValueError, match="dynamo=True"):
        pasted(code(SCOPES), monkeypatch)["names_to_exclude"](file)


def test_modelopt_is_given_expressions_that_match_one_name_each() -> None:
    """They are matched from the start of a name: `node_linear_1` must not take `node_linear_10` along."""
    assert 'f"{re.escape(name)}$"' in code(SCOPES)


def test_bf16_is_for_one_converter_alone() -> None:
    text = code({"": scope("bf16")}, "cast_bf16")
    assert "convert_with_modelopt" in text
    assert "def convert_with_onnxconverter_common" not in text
    assert "onnxconverter-common converts to FP16 alone" in text
