"""The result of an audit: reporters read it, and `plan.json` and `measurements.json` store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from .cpu import CpuTarget
from .decisions import Decisions
from .fix import Fixes
from .generation import Generation
from .graph import Node, Subject
from .ledger import LedgerRow
from .measure import (
    Contribution,
    Finding,
    FlaggedRegion,
    InputRange,
    Linearity,
    Magnitudes,
    NodeError,
    Noise,
    Verdict,
    Weight,
)
from .plan import Evaluation, Execution, Plan, Timing, Today, Verification
from .quantization import QuantizedLayer, QuantizedPlan
from .repair import Repair
from .repeats import RepeatedCalls
from .training import Training
from .written import FileField, MeasurementField, Unwritten, empty

FORMAT_VERSION = 1
"""Version of plan.json and measurements.json; it increases when a field changes its meaning or is removed."""

Contributions = Mapping[str, Mapping[str, Mapping[str, float]]]
"""{format: {module: {operation: the largest relative change of the outputs that it causes}}}."""

Groups = tuple[tuple[str, ...], ...]
"""Groups of names: each group lists all names of one shared parameter or module."""

FILES = ("report.html", "plan.json", "measurements.json", "patched_model.py", "findings.sarif")
"""Names of the files that every audit writes."""


@dataclass(frozen=True)
class Proposal:
    """A criterion that the user did not set: applied by default, or only suggested."""

    output: Annotated[str, FileField("the output's name in the model's return value")]
    criterion: Annotated[str, FileField("the criterion in the syntax of `--criterion`; its limit is a suggestion")]
    because: Annotated[str, FileField("the evidence for the suggestion, in words")]
    holds: Annotated[bool, FileField("`true`: applied by default; `false`: only suggested")] = False


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one operation's inputs, computation and result under a plan, by torch's names."""

    inputs: Annotated[tuple[str, ...], FileField("dtypes of the input tensors, before autocast casts them")]
    computed: Annotated[str, FileField("dtype in which the operation computes, after autocast and promotion")]
    output: Annotated[str, FileField("dtype of the operation's first result")]


@dataclass(frozen=True)
class Provenance:
    """Name and source file of the audited model, and the origin of its inputs and weights."""

    name: Annotated[str, FileField("name of the model: from the target, or the model's class")]
    target: Annotated[str, FileField("TARGET, as the user gave it or relative to the working directory")]
    file: Annotated[str | None, FileField("the model's source file, relative to the repository; `null`: no file")]
    inputs_source: Annotated[str, FileField("origin of the inputs")]
    weights_source: Annotated[str, FileField("origin of the weights")]
    synthetic_inputs: Annotated[bool, FileField("whether the inputs were generated, not supplied by the user")] = False
    random_weights: Annotated[bool, FileField("whether the weights are random, not loaded")] = False

    @classmethod
    def of(cls, subject: Subject) -> Provenance:
        """The Provenance of a Subject, that is, of a model with its inputs."""
        same = {each.name: getattr(subject, each.name) for each in fields(cls) if each.name != "file"}
        return cls(file=subject.origin.path if subject.origin else None, **same)


@dataclass(frozen=True)
class Environment:
    """Device, versions and settings that the numbers depend on; and what differs between equal audits, so that no file
    contains it: seconds of each stage, by name, and the peak of resident memory in words, if memory was limited."""

    auditor: Annotated[str, FileField("version of the auditor")]
    torch: Annotated[str, FileField("version of PyTorch")]
    device: Annotated[str, FileField("`cpu` if it emulates a GPU, or the name of the GPU or CPU")]
    execution: Execution
    seed: Annotated[int, FileField("seed of every random choice")]
    seconds: Unwritten[Mapping[str, float]] = field(default_factory=dict)
    libraries: Annotated[Mapping[str, str], FileField("versions of CUDA, cuDNN and driver, or oneDNN")] = empty()
    flags: Annotated[Mapping[str, Any], FileField("the caller's torch flags; the audit runs IEEE FP32")] = empty()
    memory: Annotated[tuple[str, ...], FileField("how the audit limited its memory; empty: not limited")] = ()
    peak_memory: Unwritten[str | None] = None


@dataclass(frozen=True)
class NodeReport:
    """All results for one operation: measurements, verdicts and findings."""

    node: Annotated[Node, FileField("the operation")]
    findings: Annotated[tuple[str, ...], FileField("codes of the rules that report this operation")]
    verdicts: Annotated[Mapping[str, Verdict], FileField("by format: verdict and reason")]
    exposed: Annotated[Mapping[str, tuple[str, ...]], FileField("by format: strategies that run it in low precision")]
    errors: Annotated[Mapping[str, NodeError], FileField("by format: error of this operation")]
    contributions: Annotated[Mapping[str, Contribution], FileField("by format: the error's effect on the outputs")]
    flops: Annotated[int, FileField("floating-point operations; 0 if no matrix product or convolution", least=0)]
    range: Annotated[Magnitudes | None, FileField("magnitudes of the FP32 result; `null`: not floating-point")]
    written: Annotated[bool, FileField("whether `range.max_abs` is a constant, such as a mask's -1e9")] = False
    planned: Annotated[Dtypes | None, FileField("dtypes under the recommended plan; `null`: unknown")] = None


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit, as data; reporters read it, and `plan.json` and `measurements.json` store it.

    live: the model and its batches; None if the audit was loaded from its files. programs: contents of exported
    programs, by file name. fixed: verified changes of the source, if they were searched for.
    """

    subject: Annotated[Provenance, FileField("names and origins of the model, its weights and its inputs")]
    live: Unwritten[Subject | None] = None
    parameters: Annotated[int, FileField("number of parameters, shared ones counted once; `apply` checks it", least=0)]
    structure: Annotated[str, FileField("digest of modules and parameters; `apply` checks it")] = ""
    inputs: Annotated[tuple[str, ...], FileField("dtype and shape of each tensor of the first batch")]
    tied_parameters: Annotated[Groups, FileField("groups of names in the state dict that are one parameter")] = ()
    shared_modules: Annotated[Groups, FileField("groups of paths that are one module")] = ()
    formats: Annotated[tuple[str, ...], FileField("number formats that were audited")]
    max_error: Annotated[float, FileField("error budget: the largest error that a plan may have", least=0, exact=True)]
    metric: Annotated[str, FileField("the error measure")]
    criteria: Annotated[tuple[str, ...], FileField("the user's criteria; errors are shares of their limits")] = ()
    proposals: Annotated[tuple[Proposal, ...], FileField("criteria not set by the user: defaults and suggestions")] = ()
    capture_method: Annotated[str, FileField("`path`: only valid for inputs on the same path", choices=("run", "path"))]
    environment: Annotated[Environment, FileField("device, versions and settings of the audit")]
    recommended: Annotated[str | None, FileField("name of the plan to use; `null`: FP32")]
    use: Annotated[str, FileField("purpose of the recommended plan", choices=("inference", "training"))] = "inference"
    recommendation: Annotated[str, FileField("the reason for `recommended`, and the best plan for each use")]
    plans: Annotated[Mapping[str, Plan], FileField("a plan per strategy and format, such as `autocast_bf16`")]
    baselines: Annotated[Mapping[str, Verification], FileField("runs in low precision without a plan, by name")]
    fp32_today: Annotated[Today | None, FileField("FP32 under the caller's own flags; `null`: IEEE flags")] = None
    timing: Annotated[Timing | None, FileField("conditions of measured time and memory; `null`: not measured")] = None
    cpu: Annotated[CpuTarget | None, FileField("the CPU as the target, and what it ran; `null`: CUDA")] = None
    nodes: Annotated[tuple[NodeReport, ...], MeasurementField("every operation of the graph, in execution order")] = ()
    classes: Annotated[Mapping[str, str], MeasurementField("by path: class of a module without operations")] = empty()
    graph_inputs: Annotated[tuple[str, ...], MeasurementField("names of the inputs in the captured graph")] = ()
    input_ranges: Annotated[tuple[InputRange, ...], MeasurementField("range of every input tensor")] = ()
    graph_outputs: Annotated[tuple[str, ...], MeasurementField("names of the outputs in the captured graph")] = ()
    weights: Annotated[tuple[Weight, ...], MeasurementField("magnitudes of every parameter and buffer")] = ()
    ledger: Annotated[tuple[LedgerRow, ...], MeasurementField("dtypes of weights and operations at each stage")] = ()
    regions: Annotated[tuple[FlaggedRegion, ...], MeasurementField("connected sensitive or unsafe operations")] = ()
    linearity: Annotated[tuple[Linearity, ...], MeasurementField("accuracy of predicted effects, per format")] = ()
    decisions: Annotated[tuple[Decisions, ...], FileField("by format: decisions in the model that flip")] = ()
    flags: Annotated[Mapping[str, float], FileField("by flag: predicted share of the error budget that it uses")] = (
        empty()
    )
    repairs: Annotated[
        tuple[Repair, ...], FileField("gains by repairs of causes in the source, the largest first")
    ] = ()
    noise: Annotated[Noise | None, MeasurementField("difference between repeated FP32 runs")] = None
    findings: Annotated[tuple[Finding, ...], FileField("every match of a rule, one finding per operation")]
    contributions: Annotated[
        Contributions, FileField("by format, module, operation: largest contribution, if at least 1/8 of `max_error`")
    ] = field(default_factory=dict)
    warnings: Annotated[tuple[str, ...], FileField("limitations of this audit, in words")]
    training: Annotated[Training | None, FileField("results for a training step; `null` in mode `inference`")] = None
    evaluation: Annotated[Evaluation | None, FileField("the user's score of the model; `null`: no score")] = None
    generation: Annotated[Generation | None, FileField("FP32's generated tokens; `null`: not requested")] = None
    quantization: Annotated[
        tuple[QuantizedLayer, ...], FileField("layers by [quantization scheme](quantization.md), largest effect first")
    ] = ()
    quantized_plans: Annotated[
        tuple[QuantizedPlan, ...],
        FileField("[plans](quantization.md#plans) of schemes: a plan per scheme, and a mixed plan"),
    ] = ()
    command: Annotated[str, MeasurementField("the command or function call that made the audit")] = ""
    repeats: Annotated[
        tuple[RepeatedCalls, ...], MeasurementField("error under the recommended plan over repeated calls")
    ] = ()
    programs: Unwritten[Mapping[str, bytes]] = field(default_factory=dict)
    fixed: Unwritten[Fixes | None] = None
    plan_errors: Annotated[Mapping[str, float], MeasurementField("by node: error under the recommended plan")] = empty()

    @property
    def plan(self) -> Plan | None:
        """The recommended plan; None if the audit recommends FP32."""
        return self.plans.get(self.recommended or "")
