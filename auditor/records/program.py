"""What a plan is that is a program of its own: its operations, and which of them stay FP32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import Written

REASONS = ("unsafe", "untested", "refused", "budget", "no-gain")
"""Why an operation of a graph does not run low, in one word."""


@dataclass(frozen=True)
class Kept:
    """One operation of an exported graph that stays FP32."""

    name: Annotated[str, Written("in the exported graph")]
    op: Annotated[str, Written("ATen overload")]
    kind: Annotated[
        str,
        Written(
            "`unsafe`: it must not run low; `untested`: what it does low is not known; `refused`: it cannot run low; "
            "`budget`: the error that it would add is more than the time it saves is worth; `no-gain`: lowering it alone "
            "saves nothing",
            choices=REASONS,
        ),
    ]
    because: Annotated[str, Written("the same in one clause, with its evidence")]
    node: Annotated[str | None, Written("its name in the captured graph; `null`: there is none")] = None


@dataclass(frozen=True)
class Onnx:
    """A program as an ONNX model."""

    file: Annotated[str, Written("name of the file beside plan.json")]
    ends: Annotated[
        str,
        Written(
            "what its floating inputs and outputs are: `fp32`, or `low`: the plan's format", choices=("fp32", "low")
        ),
    ]
    nodes: Annotated[
        int,
        Written(
            "operations that read or give floating values; casts, constants and what asks for shapes aside", least=0
        ),
    ]
    high: Annotated[int, Written("those of them that read or give FP32 where they could another format", least=0)]
    casts: Annotated[int, Written("casts in the graph", least=0)]
    runtime: Annotated[str, Written("what ran it, and its version")]
    error: Annotated[
        float | None,
        Written(
            "relative L2 error of the outputs as the runtime gave them in a fresh process, worst batch; `null`: it did not run. "
            "onnxruntime on a CPU computes in FP32 where it has no kernel of the format, and may look better than a GPU"
        ),
    ]
    program_error: Annotated[float | None, Written("the same of the plan's own program")]
    failure: Annotated[str | None, Written("why it did not run, in one line")] = None
    rounded_error: Annotated[
        float | None,
        Written(
            "the error of the same model with every value in the plan's format computed in FP32 and rounded to it, as a GPU does; "
            "`null`: it did not run so"
        ),
    ] = None


@dataclass(frozen=True)
class Program:
    """A plan as a program of its own: the exported graph with a precision for every operation."""

    file: Annotated[str, Written("name of the file beside plan.json, read by `torch.export.load`")]
    operations: Annotated[int, Written("operations of the graph that read FP32 values", least=0)]
    low: Annotated[int, Written("those that run in the format", least=0)]
    casts: Annotated[int, Written("conversions in the graph", least=0)]
    kept: Annotated[tuple[Kept, ...], Written("operations that stay FP32")] = ()
    fixed: Annotated[
        str | None,
        Written("why it takes the audited batch size alone; `null`: it takes any, the first dimension is open"),
    ] = None
    onnx: Annotated[Onnx | None, Written("the same as an ONNX model, where that was asked for")] = None
