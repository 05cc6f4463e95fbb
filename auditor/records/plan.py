"""What a plan is, what it was predicted to cost, and how it held up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from .run import CriterionValue, NonFinite, Score, Timed
from .written import FileField, MeasurementField, empty


@dataclass(frozen=True)
class ScopeChoice:
    """Precision of one scope."""

    precision: Annotated[str, FileField("`fp32`, or the plan's `format`")]
    because: Annotated[tuple[str, ...], FileField("codes of rules and reasons in words; empty where it runs low")] = ()
    output: Annotated[str, FileField("`keep`: what leaves it stays as it is", choices=("cast", "keep"))] = "cast"
    cost: Annotated[float | None, FileField("share of the plan's cost that lowering it saves; `null`: low")] = None
    keep: Annotated[tuple[str, ...], FileField("torch functions kept FP32 in a low scope; `pow` is x ** 2 too")] = ()


@dataclass(frozen=True)
class Reason:
    """Why modules or operations do not run low under a plan, in one clause that holds for each of them."""

    kind: Annotated[
        str,
        FileField(
            "`unsafe`: an operation of it must not run low; `untested`: what it does low is not known; `conflict`: low, it "
            "would meet two dtypes; `budget`: lowering it alone breaks the budget; `margin`: that takes more of the budget "
            "than plans use; `no-gain`: lowering it alone gains nothing; `tied`: it shares a weight; `inherited`: FP32 "
            "reaches or leaves it; `author`: so it is written; `strategy`: the strategy runs it so by itself; "
            "`not-floating`: nothing in it has a precision",
            choices=tuple(
                "unsafe untested conflict budget margin no-gain tied inherited author strategy not-floating".split()
            ),
        ),
    ]
    words: Annotated[str, FileField("the same in one clause, with its evidence")]
    modules: Annotated[tuple[str, ...], FileField("modules in FP32 that it is about")] = ()
    operations: Annotated[tuple[str, ...], FileField("operations in low modules, and those without a precision")] = ()
    by: Annotated[str | None, FileField("the module or operation that decides, where it is another")] = None
    adds: Annotated[float | None, FileField("what lowering it alone adds to the error; `null`: it is forbidden")] = None
    left: Annotated[float | None, FileField("how much of the budget the plan leaves")] = None
    saves: Annotated[float | None, FileField("share of the plan's cost that lowering it alone saves")] = None
    ran: Annotated[bool, FileField("whether `adds` comes from a run; else it is predicted")] = False


@dataclass(frozen=True)
class Verification:
    """The emitted artefact, run for real: the batches without gradients, and the first one with them."""

    error: Annotated[
        float | None, FileField("worst run without gradients; `measured_error` is that of a run that counts")
    ]
    finite: Annotated[bool, FileField("whether the outputs were")]
    inputs: Annotated[str, FileField("`held-out`: inputs the plan was not made from", choices=("held-out", "audited"))]
    execution: Annotated[str, FileField("`native`: on a GPU; `emulated`: on a CPU", choices=("native", "emulated"))]
    failure: Annotated[str | None, FileField("why the patched model did not run, in one line")] = None
    joint: Annotated[float | None, FileField("relative L2 of all outputs, if `measured_error` is another")] = None
    criteria: Annotated[tuple[CriterionValue, ...], FileField("the criteria that were set, each with its value")] = ()
    apart: Annotated[Mapping[str, float], FileField("by output: errors over ten times that of all together")] = empty()
    with_gradients: Annotated[float | None, FileField("`measured_error` with gradients; `null`: not run")] = None
    ungraded: Annotated[str | None, FileField("what the FP32 model raises with gradients; `null`: nothing")] = None
    noise: Annotated[float | None, FileField("how far apart runs in FP32 were; errors are no better known")] = None
    floor: Annotated[float, FileField("error up to which it holds all the same: three times `noise`, or 0")] = 0.0
    nonfinite: Annotated[NonFinite | None, FileField("first operation not finite, as for `baselines`")] = None


@dataclass(frozen=True)
class Memory:
    """Bytes that a forward pass needs."""

    weights: Annotated[int, FileField("parameters and buffers", least=0)]
    activations: Annotated[int, FileField("the most that inputs, results and low copies take at one time", least=0)]


@dataclass(frozen=True)
class KeptOperation:
    """One operation of an exported graph that stays FP32."""

    name: Annotated[str, FileField("in the exported graph")]
    op: Annotated[str, FileField("ATen overload")]
    kind: Annotated[
        str,
        FileField(
            "`unsafe`: it must not run low; `untested`: what it does low is not known; `refused`: it cannot run low; "
            "`budget`: its error would be worth more than its time; `no-gain`: lowering it alone saves nothing",
            choices=("unsafe", "untested", "refused", "budget", "no-gain"),
        ),
    ]
    because: Annotated[str, FileField("the same in one clause, with its evidence")]
    node: Annotated[str | None, FileField("its name in the captured graph; `null`: there is none")] = None


@dataclass(frozen=True)
class Onnx:
    """A program as an ONNX model."""

    file: Annotated[str, FileField("name of the file beside plan.json")]
    ends: Annotated[str, FileField("inputs and outputs: `fp32`, or `low`: the plan's", choices=("fp32", "low"))]
    nodes: Annotated[int, FileField("operations on floating values, without casts and constants", least=0)]
    high: Annotated[int, FileField("those of them that read or give FP32 where they could another format", least=0)]
    casts: Annotated[int, FileField("casts in the graph", least=0)]
    runtime: Annotated[str, FileField("what ran it, and its version")]
    error: Annotated[float | None, FileField("relative L2 of the runtime's outputs; `null`: it did not run")]
    program_error: Annotated[float | None, FileField("the same of the plan's own program")]
    failure: Annotated[str | None, FileField("why it did not run, in one line")] = None
    rounded_error: Annotated[float | None, FileField("with every value rounded to the format, as a GPU does")] = None


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


@dataclass(frozen=True)
class Plan:
    """Precision of every scope under one strategy and format, with what it costs and how it held up."""

    name: Annotated[str, FileField("the same as its key in `plans`")]
    strategy: Annotated[str, FileField("`autocast`: torch.autocast; `cast`: weights stored low; `graph`: a program")]
    format: Annotated[str, FileField("name of the low format, such as `fp16`")]
    scopes: Annotated[Mapping[str, ScopeChoice], FileField("precision by module; others have the nearest one above")]
    predicted_error: Annotated[float, FileField("before anything was run: all roundings, in quadrature")] = math.nan
    low_precision_flops: Annotated[float, FileField("share of the FLOPs that run low", least=0, most=1)] = math.nan
    predicted_speedup: Annotated[float, FileField("over FP32, see [costs](method.md#what-a-choice-costs)")] = math.nan
    measured_error: Annotated[float | None, FileField("of the artefact, worst batch; `null`: not finite or failed")] = (
        None
    )
    verified: Annotated[bool, FileField("the patched model was run, and is within the budget")] = False
    verification: Annotated[Verification | None, FileField("run of the patched model; `null`: not run")] = None
    note: Annotated[str, MeasurementField("what is to be said of it beside, in words")] = ""
    reasons: Annotated[tuple[Reason, ...], FileField("why modules and operations do not run low")] = ()
    least: Annotated[
        tuple[str, ...] | None,
        FileField("modules that would stay FP32 if all that gains nothing were low; `null`: not sought"),
    ] = None
    objective: Annotated[str, FileField("what the plan minimises", choices=("time", "memory", "flops"))] = "time"
    raised: Annotated[
        str,
        FileField(
            "what is raised to FP32 where the plan does not store it low, since the audited model came with it in "
            "FP16 or BF16: `none`; `inputs`; `weights`: parameters and buffers too; `attributes`: also tensors that "
            "modules hold without registering them; `kept`: nothing, since the forward casts to what it is stored in",
            choices=("none", "inputs", "weights", "attributes", "kept"),
        ),
    ] = "none"
    stored_low: Annotated[Mapping[str, int], FileField("by dtype: weights in it; `apply` refuses more")] = empty()
    reach: Annotated[float | None, FileField("if nothing is low: smallest error of a low run")] = None
    target: Annotated[str | None, FileField("the GPU that `predicted_speedup` is for")] = None
    memory: Annotated[Memory | None, FileField("what one forward needs under the plan")] = None
    fp32_memory: Annotated[Memory | None, FileField("the same without the plan")] = None
    program: Annotated[Program | None, FileField("what a plan of strategy `graph` is")] = None
    score: Annotated[Score | None, FileField("what the user's own function says of the model under it")] = None

    timed: Annotated[Timed | None, FileField("time and memory of one forward of the patched model")] = None

    @property
    def holds(self) -> bool:
        """Whether it is verified, and the user's own score, where there is one, no worse than it may be."""
        return self.verified and (self.score is None or self.score.holds)

    @property
    def kept(self) -> tuple[str, ...]:
        """Modules in FP32 with something in them that has a precision; where no reasons are known, scopes in FP32."""
        if not self.reasons:
            return tuple(path for path, choice in self.scopes.items() if choice.precision == "fp32")
        return tuple(path for reason in self.reasons if reason.kind != "not-floating" for path in reason.modules)

    @property
    def islands(self) -> int:
        """How many scopes have another precision than the root."""
        return sum(choice.precision != self.scopes[""].precision for choice in self.scopes.values())

    @property
    def exceptions(self) -> tuple[tuple[str, str], ...]:
        """(module, function) of what stays FP32 in low scopes."""
        return tuple((path, name) for path, choice in self.scopes.items() for name in choice.keep)
