"""Entry point of the process that runs ONNX models: `python -m auditor.verify.onnxruns FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .programs import serve
from .running import Answers, failure_of

SUFFIX = ".onnx"
"""What names of the files end with."""

PROVIDER = "CPUExecutionProvider"

_NAMES = {"tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16}


def main(folder: Path) -> None:
    """Run what `torch.onnx.export` wrote."""
    serve(folder, run_model, SUFFIX)


def run_model(file: Path, batches: list[Any], settings: dict[str, Any]) -> Answers | str:
    """What onnxruntime answers on its CPU provider, floating outputs raised to FP32; or why it does not."""
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(file), options, providers=[PROVIDER])
        return Answers([_answer(session, batch) for batch in batches])
    except Exception as error:
        return failure_of(error)


def _answer(session: Any, batch: Any) -> list[torch.Tensor]:
    given = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    taken = session.get_inputs()
    fed = {each.name: x.to(_NAMES.get(each.type, x.dtype)).cpu().numpy() for each, x in zip(taken, given, strict=True)}
    found = [torch.from_numpy(x) for x in session.run(None, fed)]
    return [x.float() if x.dtype is torch.float16 else x for x in found]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
