"""Programs as ONNX models: run in a fresh process, and what is said of them true of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import auditor
from auditor.errors import AuditorError
from auditor.graphs import onnxfile
from auditor.graphs.onnxfile import with_onnx
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.metrics import output_error
from auditor.records.audit import Audit
from auditor.report.plans import program_line
from auditor.report.words import ratio
from tests.unit.graphs.models import flat


@pytest.fixture(scope="module", params=["fp32", "low"])
def found(audit: Audit, request: pytest.FixtureRequest) -> Audit:
    return with_onnx(audit, request.param)


def test_the_model_answers_with_the_stated_error(found: Audit) -> None:
    said = found.plans["graph_fp16"].program.onnx
    assert said.failure is None
    x = found.live.batches[0][0][0]
    with torch.no_grad():
        expected = tensor_outputs(flat()(x))
    session = onnxruntime.InferenceSession(found.programs["graph_fp16.onnx"], providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    assert taken.type == ("tensor(float)" if said.ends == "fp32" else "tensor(float16)")
    given = x.numpy() if said.ends == "fp32" else x.half().numpy()
    answers = [torch.from_numpy(np.asarray(y, dtype=np.float32)) for y in session.run(None, {taken.name: given})]
    assert said.error == pytest.approx(output_error(expected, answers), rel=1e-6)
    assert 0 < said.error <= 0.01
    assert said.program_error == found.plans["graph_fp16"].measured_error


def test_bf16_is_checked_and_what_has_no_kernel_named(found: Audit) -> None:
    plan = found.plans["graph_bf16"]
    said = plan.program.onnx
    assert said.error is None
    model = onnx.load_from_string(found.programs["graph_bf16.onnx"])
    onnx.checker.check_model(model, full_check=True)
    types = _types_of(model)
    assert onnx.TensorProto.FLOAT16 not in types.values()
    assert {types[name] for name in types if "weight" in name} == {onnx.TensorProto.BFLOAT16}
    wanted = onnx.TensorProto.FLOAT if said.ends == "fp32" else onnx.TensorProto.BFLOAT16
    assert {types[port.name] for port in (*model.graph.input, *model.graph.output)} == {wanted}
    refused = (said.failure or "").removeprefix("onnxruntime's CPU provider has no BF16 kernel for ")
    lacking, _, rest = refused.partition("(")
    (first, *_) = [node for node in model.graph.node if node.op_type == lacking]
    assert types[first.output[0]] == onnx.TensorProto.BFLOAT16
    assert rest.endswith("; its types are checked")
    line = program_line(plan)
    assert f"checked, not run: {said.failure}; relative L2 error" in line
    assert f"{ratio(said.rounded_error)} in onnxruntime with every BF16 value rounded as on a GPU" in line
    assert said.ends == "low" or said.rounded_error == pytest.approx(plan.measured_error, rel=0.1)


def _types_of(model: onnx.ModelProto) -> dict[str, int]:
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    ports = (*graph.input, *graph.output, *graph.value_info)
    return {x.name: x.type.tensor_type.elem_type for x in ports} | {x.name: x.data_type for x in graph.initializer}


class Apart(nn.Module):
    """An epsilon that is zero in FP16, and that the exporter's own optimizer takes for zero in FP32 too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1e-9 / (x + 1e-9)


def test_saving_writes_the_model_and_an_epsilon_stays_in_the_file(tmp_path: Path) -> None:
    x = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    found = auditor.audit(Apart(), x, strategies="graph", formats="fp16", device="cpu")
    assert tmp_path / "graph_fp16.onnx" in found.save(tmp_path, onnx=True)
    said = auditor.load(tmp_path).plans["graph_fp16"].program.onnx
    assert said.failure is None
    assert said.error is not None
    session = onnxruntime.InferenceSession(tmp_path / "graph_fp16.onnx", providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert answer[0, 0] == pytest.approx(1.0, rel=1e-3)
    assert answer[0, 1] == pytest.approx(1e-9, abs=1e-9)


class Singular(nn.Module):
    """The exporter to ONNX knows no such operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x)


def test_what_onnx_has_no_operation_for_is_named_in_one_line() -> None:
    found = auditor.audit(Singular(), torch.randn(2, 4, 4), strategies="graph", formats="fp16", device="cpu")
    done = with_onnx(found)
    program = done.plans["graph_fp16"].program
    said = program.onnx
    assert (said.file, said.error) == ("", None)
    assert (said.failure or "").startswith("it could not be written: No ONNX function found for <OpOverload")
    assert "linalg_svd" in (said.failure or "")
    assert "\n" not in (said.failure or "")
    assert program_line(done.plans["graph_fp16"]).endswith(f"; as ONNX {said.failure}")
    assert "graph_fp16.onnx" not in done.programs


def test_what_is_missing_is_one_line(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuditorError, match="are fp32 or low, not half"):
        with_onnx(audit, "half")
    with pytest.raises(AuditorError, match="strategies graph") as caught:
        with_onnx(replace(audit, programs={}))
    assert caught.value.slug == "no-program"
    monkeypatch.setattr(onnxfile, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(AuditorError, match="ONNX models need onnxruntime, which is not installed") as caught:
        with_onnx(audit)
    assert caught.value.slug == "missing-onnx"
