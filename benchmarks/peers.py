"""Mixed-precision ONNX models beside those of other tools: does each answer well, how much of it stays FP32, what does it cost?"""

from __future__ import annotations

import argparse
import copy
import io
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import auditor
from auditor.features.programs.onnxfile import as_bytes, count_operations, insert_rounding, read, with_onnx
from auditor.features.programs.onnxgraph import tidy
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.metrics import output_error
from benchmarks import subjects
from benchmarks.harness import Row, report
from tests.corpus.case import Distance
from tests.corpus.catalogue import INFERENCE

CORPUS = tuple(case.name for case in INFERENCE if "fp16" in case.formats)
CASES = CORPUS[2 :: len(CORPUS) // 10][:10]
"""Ten known failures, evenly spread over the corpus."""
BUDGET = 0.01
"""What architectures may be off by, relative L2. A known failure has the test that its users put it to."""
PACKAGES = {
    "auditor": "model-precision-auditor",
    "AutoCast": "nvidia-modelopt",
    "auto_mixed_precision": "onnxconverter-common",
}

Feed = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model with what is asked of it: `distance(reference, low)` within `tolerance`."""

    model: nn.Module
    args: tuple[Any, ...]
    distance: Distance = output_error
    tolerance: float = BUDGET

    def holds(self, reference: Sequence[Tensor], low: Sequence[Tensor]) -> bool:
        return self.distance(reference, low) <= self.tolerance


def _llama() -> subjects.Built:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), (torch.randint(3, 64, (2, 12)),)


ARCHITECTURES: dict[str, Callable[[], subjects.Built]] = {
    "tiny_bert": subjects.SMALL["tiny_bert"],
    "gpt_2_layers": lambda: subjects.gpt(2),
    "tiny_llama": _llama,
    "vit_2_layers": lambda: subjects.vit(2),
    "mobilenetv3_small_100": subjects.SMALL["mobilenetv3_small_100"],
}


def subject(name: str) -> Subject:
    """A known failure or an architecture, the same every time."""
    torch.manual_seed(0)
    if name in ARCHITECTURES:
        model, args = ARCHITECTURES[name]()
        return Subject(model.eval(), args)
    case = next(case for case in INFERENCE if case.name == name)
    model, args = case.build()
    return Subject(model.eval(), args, case.distance, case.tolerance)


def exported(given: Subject) -> Any:
    """The model in FP32, as the other tools take it, epsilons and all."""
    import onnx_ir

    made = torch.onnx.export(copy.deepcopy(given.model), given.args, dynamo=True, verbose=False, optimize=False)
    assert made is not None
    return onnx_ir.to_proto(tidy(made.model))


def answers(content: bytes, feed: Feed) -> list[Tensor]:
    """What onnxruntime answers on its CPU provider, operation by operation as the file has them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(found) for found in session.run(None, feed)]


def by_auditor(given: Subject, model: Any, feed: Feed, reference: Sequence[Tensor]) -> bytes:
    """The auditor starts from PyTorch: recording, measuring, planning and running are in its time."""
    own: dict[str, Any] = {"max_error": given.tolerance} if given.tolerance > 0 else {}
    if own and given.distance is not output_error:
        own["metric"] = given.distance
    audit = auditor.audit(given.model, given.args, strategies="graph", formats="fp16", device="cpu", **own)
    done = with_onnx(audit)
    program = done.plans["graph_fp16"].program
    if program is None or program.onnx is None or not program.onnx.file:
        raise RuntimeError(program.onnx.failure if program and program.onnx else "no program")
    return done.programs[program.onnx.file]


def by_autocast(given: Subject, model: Any, feed: Feed, reference: Sequence[Tensor]) -> bytes:
    """NVIDIA ModelOpt's rules, with the inputs to calibrate on."""
    import numpy as np
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision

    with tempfile.TemporaryDirectory() as folder:
        file, data = Path(folder) / "model.onnx", Path(folder) / "data.npz"
        onnx.save(model, file)
        np.savez(data, **feed)
        made = convert_to_mixed_precision(str(file), keep_io_types=True, calibration_data=str(data))
        content: bytes = made.SerializeToString()
    return content


def by_auto_mixed_precision(given: Subject, model: Any, feed: Feed, reference: Sequence[Tensor]) -> bytes:
    """onnxconverter-common's bisection, with the subject's own test to validate by."""
    from onnxconverter_common.auto_mixed_precision import auto_convert_mixed_precision

    def validate(_: Sequence[Any], found: Sequence[Any]) -> bool:
        return given.holds(reference, [torch.from_numpy(each) for each in found])

    made = auto_convert_mixed_precision(model, feed, validate_fn=validate, keep_io_types=True)
    content: bytes = made.SerializeToString()
    return content


TOOLS = {"auditor": by_auditor, "AutoCast": by_autocast, "auto_mixed_precision": by_auto_mixed_precision}


def measured(name: str) -> Row:
    """All tools on one model."""
    given = subject(name)
    with torch.no_grad():
        reference = [x.detach() for x in tensor_outputs(copy.deepcopy(given.model)(*given.args))]
    row: Row = {"model": name, "tolerance": given.tolerance}
    try:
        model = exported(given)
        tensors = [x for x in pytree.tree_leaves(given.args) if isinstance(x, Tensor)]
        feed = {each.name: x.numpy() for each, x in zip(model.graph.input, tensors, strict=True)}
        row["fp32 error"] = given.distance(reference, answers(model.SerializeToString(), feed))
    except Exception as error:
        return row | {"failure": _line(error)}
    for tool, make in TOOLS.items():
        row[tool] = _one(make, given, copy.deepcopy(model), feed, reference)
    return row


def _one(make: Callable[..., bytes], given: Subject, model: Any, feed: Feed, reference: Sequence[Tensor]) -> Row:
    try:
        start = sum(os.times()[:4])
        content = make(given, model, feed, reference)
        elapsed = sum(os.times()[:4]) - start
    except ModuleNotFoundError as error:
        return {"failure": f"not installed: {error.name}"}
    except Exception as error:
        return {"failure": _line(error)}
    found: Row = {"seconds": round(elapsed, 2)}
    try:
        written = read(content)
        nodes, high, casts = count_operations(written)
        found |= {"operations": nodes, "fp32": high, "casts": casts}
        found["onnxruntime error"] = _plain(given.distance(reference, answers(content, feed)))
        insert_rounding(written, "fp16")
        error = given.distance(reference, answers(as_bytes(written), feed))
        found |= {"error": _plain(error), "holds": error <= given.tolerance}
    except Exception as raised:
        found["failure"] = _line(raised)
    return found


def _plain(error: float) -> float | str:
    return error if math.isfinite(error) else str(error)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def installed(tool: str) -> str:
    try:
        return version(PACKAGES[tool])
    except PackageNotFoundError:
        return "not installed"


def cell(row: Row, tool: str) -> str:
    """Error, operations in FP32 of all, seconds; what misses the test in brackets."""
    found = row.get(tool)
    if found is None:
        return "no FP32 ONNX model"
    if "error" not in found:
        return "not installed" if "not installed" in found["failure"] else "fails"
    error = found["error"]
    shown = error if isinstance(error, str) else f"{error:.2g}"
    shown = shown if found["holds"] else f"({shown})"
    share = f"{found['fp32']}/{found['operations']}" if "fp32" in found else "?"
    return f"{shown}, {share}, {found['seconds']:.1f} s"


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """By tool: models that export and hold their test, and operations in FP32 over those that both it and the auditor hold."""
    there = [row for row in rows if "auditor" in row]
    found: dict[str, Any] = {"models": len(rows), "exported": len(there)}
    for tool in TOOLS:
        holding = [row for row in there if row[tool].get("holds")]
        both = [row for row in holding if row["auditor"].get("holds") and "fp32" in row[tool]]
        seconds = [row[tool]["seconds"] for row in there if "seconds" in row[tool]]
        found[tool] = {
            "version": installed(tool),
            "holds": len(holding),
            "models where both hold": len(both),
            "fp32 of operations there": {
                each: [sum(row[each][key] for row in both) for key in ("fp32", "operations")]
                for each in dict.fromkeys(("auditor", tool))
            },
            "seconds": round(sum(seconds), 1),
        }
    return found


GROUPS = {"the ten cases": CASES, "all known failures": CORPUS, "architectures": tuple(ARCHITECTURES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="these alone, and no results are written: else all known failures in FP16 and five architectures",
    )
    options = parser.parse_args()
    rows = []
    for name in options.models or (*CORPUS, *ARCHITECTURES):
        rows.append(_quietly(name))
        print(f"{name}: {', '.join(f'{tool} {cell(rows[-1], tool)}' for tool in TOOLS)}", file=sys.stderr, flush=True)
    if options.models:
        return
    shown = [
        {"model": row["model"], "allowed": row["tolerance"]}
        | {tool: cell(row, tool) for tool in TOOLS}
        | {"measured": row}
        for row in rows
    ]
    summary = {
        title: totals(found)
        for title, names in GROUPS.items()
        if (found := [row for row in rows if row["model"] in names])
    }
    columns = {"model": "", "allowed": "g", **dict.fromkeys(TOOLS, "")}
    report("peers", shown, columns, {"totals": summary})
    for title, found in summary.items():
        print(f"{title}: {found['exported']} of {found['models']} are exported")
        for tool in TOOLS:
            print(f"  {tool} {found[tool]}")


def _quietly(name: str) -> Row:
    logging.disable(logging.ERROR)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return measured(name)


if __name__ == "__main__":
    main()
