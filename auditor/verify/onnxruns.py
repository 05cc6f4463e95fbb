"""What the process runs that verifies ONNX models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from .programs import serve
from .running import Answers, failure_of

SUFFIX = ".onnx"
"""What names of the files end with."""

PROVIDER = "CPUExecutionProvider"

AS_IT_IS = ".rounded"
"""What names end with, before the suffix, of models that are run operation by operation as the file has them."""

_NAMES = {"tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16}


def main() -> None:
    """Run what `torch.onnx.export` wrote."""
    serve(run_model, SUFFIX)


def run_model(file: Path, batches: list[Any], settings: Mapping[str, Any]) -> Answers | str:
    """What onnxruntime answers on its CPU provider, floating outputs raised to FP32; or why it does not."""
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if file.stem.endswith(AS_IT_IS):
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(str(file), options, providers=[PROVIDER])
        return Answers([_answer(session, batch) for batch in batches])
    except Exception as error:
        return failure_of(error)


def _answer(session: Any, batch: Any) -> list[torch.Tensor]:
    given = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    taken = session.get_inputs()
    fed = {each.name: _fed(x.to(_NAMES.get(each.type, x.dtype)).cpu()) for each, x in zip(taken, given, strict=True)}
    found = [_taken(x) for x in session.run_with_ort_values(None, fed)]
    return [x.float() if x.dtype in _NAMES.values() else x for x in found]


def _fed(x: torch.Tensor) -> Any:
    """A tensor as onnxruntime takes it; NumPy has no BF16, whose bits go by another name."""
    from onnx import TensorProto
    from onnxruntime import OrtValue

    x = x.contiguous()
    if x.dtype is _NAMES["tensor(bfloat16)"]:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(torch.uint16).numpy(), TensorProto.BFLOAT16)
    return OrtValue.ortvalue_from_numpy(x.numpy())


def _taken(value: Any) -> torch.Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return from_dlpack(value).clone()
    return torch.from_numpy(value.numpy())
