"""What a plan is that is a program of its own: its operations, and which of them stay FP32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import FileField

REASONS = ("unsafe", "untested", "refused", "budget", "no-gain")
"""Why an operation of a graph does not run low, in one word."""


@dataclass(frozen=True)
class KeptOperation:
    """One operation of an exported graph that stays FP32."""

    name: Annotated[str, FileField("in the exported graph")]
    op: Annotated[str, FileField("ATen overload")]
    kind: Annotated[
        str,
        FileField(
            "`unsafe`: it must not run low; `untested`: what it does low is not known; `refused`: it cannot run low; "
            "`budget`: the error that it would add is more than the time it saves is worth; `no-gain`: lowering it "
            "alone saves nothing",
            choices=REASONS,
        ),
    ]
    because: Annotated[str, FileField("the same in one clause, with its evidence")]
    node: Annotated[str | None, FileField("its name in the captured graph; `null`: there is none")] = None


@dataclass(frozen=True)
class Onnx:
    """A program as an ONNX model."""

    file: Annotated[str, FileField("name of the file beside plan.json")]
    ends: Annotated[
        str, FileField("its floating inputs and outputs: `fp32`, or `low`: the plan's format", choices=("fp32", "low"))
    ]
    nodes: Annotated[int, FileField("operations on floating values, without casts and constants", least=0)]
    high: Annotated[int, FileField("those of them that read or give FP32 where they could another format", least=0)]
    casts: Annotated[int, FileField("casts in the graph", least=0)]
    runtime: Annotated[str, FileField("what ran it, and its version")]
    error: Annotated[
        float | None, FileField("relative L2 error of the outputs as the runtime gave them; `null`: it did not run")
    ]
    program_error: Annotated[float | None, FileField("the same of the plan's own program")]
    failure: Annotated[str | None, FileField("why it did not run, in one line")] = None
    rounded_error: Annotated[
        float | None, FileField("the error with every value rounded to the plan's format, as a GPU does")
    ] = None


@dataclass(frozen=True)
class Program:
    """A plan as a program of its own: the exported graph with a precision for every operation."""

    file: Annotated[str, FileField("name of the file beside plan.json, read by `torch.export.load`")]
    operations: Annotated[int, FileField("operations of the graph that read FP32 values", least=0)]
    low: Annotated[int, FileField("those that run in the format", least=0)]
    casts: Annotated[int, FileField("conversions in the graph", least=0)]
    kept: Annotated[tuple[KeptOperation, ...], FileField("operations that stay FP32")] = ()
    fixed: Annotated[str | None, FileField("why it takes the audited batch size alone; `null`: it takes any")] = None
    onnx: Annotated[Onnx | None, FileField("the same as an ONNX model, where that was asked for")] = None
