"""Programs as ONNX models: run in a fresh process, and what is said of them true of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import auditor
from auditor.errors import AuditorError
from auditor.formats.metrics import output_error
from auditor.graphs import onnxfile
from auditor.graphs.onnxfile import with_onnx
from auditor.records.audit import Audit
from auditor.report.programs import program_line
from auditor.runs.outputs import tensor_outputs
from tests.unit.graphs.models import flat


@pytest.fixture(scope="module")
def audit() -> Audit:
    torch.manual_seed(0)
    return auditor.audit(flat(), torch.randn(4, 16), strategies="graph", formats="fp16", device="cpu")


@pytest.fixture(scope="module", params=["fp32", "low"])
def found(audit: Audit, request: pytest.FixtureRequest) -> Audit:
    return with_onnx(audit, request.param)


def test_the_model_answers_with_the_stated_error(found: Audit) -> None:
    said = found.plans["graph_fp16"].program.onnx  # type: ignore[union-attr]
    assert said is not None
    assert said.failure is None
    x = found.subject.batches[0][0][0]
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


def test_weights_are_low_and_what_is_unsafe_is_not(found: Audit) -> None:
    model = onnx.load_from_string(found.programs["graph_fp16.onnx"])
    weights = {each.name: each.data_type for each in model.graph.initializer if "weight" in each.name}
    assert set(weights.values()) == {onnx.TensorProto.FLOAT16}
    assert len(weights) == 2
    typed = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    types = {each.name: each.type.tensor_type.elem_type for each in typed.graph.value_info}
    (power,) = [node for node in typed.graph.node if node.op_type == "Pow"]
    assert types[power.output[0]] == onnx.TensorProto.FLOAT
    said = found.plans["graph_fp16"].program.onnx  # type: ignore[union-attr]
    assert 0 < said.high < said.nodes  # type: ignore[union-attr]


def test_the_line_has_the_three_errors(found: Audit) -> None:
    plan = found.plans["graph_fp16"]
    said = plan.program.onnx  # type: ignore[union-attr]
    line = program_line(plan.program)  # type: ignore[arg-type]
    assert f"{said.error:.1e}"[:3] in line  # type: ignore[union-attr]
    assert f"{plan.measured_error:.1e}"[:3] in line
    assert "graph_fp16.onnx" in line


def test_saving_writes_the_model(audit: Audit, tmp_path: Path) -> None:
    written = audit.save(tmp_path, onnx=True)
    assert tmp_path / "graph_fp16.onnx" in written
    onnx.checker.check_model(str(tmp_path / "graph_fp16.onnx"), full_check=True)
    plan = auditor.load(tmp_path).plans["graph_fp16"]
    assert plan.program is not None
    assert plan.program.onnx is not None
    assert plan.program.onnx.error is not None


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
