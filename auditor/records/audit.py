"""What an audit comes to: the record that every reporter reads, and that `plan.json` and `measurements.json` store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from ..folder import path_of, write
from .decisions import Decisions
from .generation import Generation
from .graph import Node, Subject
from .measure import Contribution, Finding, FlaggedRegion, Linearity, Magnitudes, NodeError, Noise, Verdict, Weight
from .plan import Evaluation, Plan, Timing, Today, Verification
from .training import Training
from .written import FileField, MeasurementField, Unwritten, empty

FORMAT_VERSION = 1
"""Version of the files; raised when a field changes its meaning or goes. In the first, plan.json held everything."""

Contributions = Mapping[str, Mapping[str, Mapping[str, float]]]
"""{format: {module: {operation: the largest contribution}}}."""

Groups = tuple[tuple[str, ...], ...]
"""Names that are one thing, a parameter or a module."""

FILES = ("report.html", "plan.json", "measurements.json", "patched_model.py", "findings.sarif")
"""What an audit is written to."""


@dataclass(frozen=True)
class Proposal:
    """A criterion that nobody set."""

    output: Annotated[str, FileField("the output, by its name in what the model returns")]
    criterion: Annotated[str, FileField("as `--criterion` takes it; the limit is a suggestion")]
    because: Annotated[str, FileField("what speaks for it, in words")]
    holds: Annotated[bool, FileField("`true`: plans are held to it by default; `false`: it is proposed")] = False


@dataclass(frozen=True)
class Dtypes:
    """What one operation reads, computes in and gives when the model runs under a plan; dtypes as torch names them."""

    inputs: Annotated[tuple[str, ...], FileField("dtypes of the tensors that it reads, before autocast casts them")]
    computed: Annotated[str, FileField("dtype that its kernel is handed after autocast and promotion")]
    output: Annotated[str, FileField("dtype of its result, of the first of several")]


@dataclass(frozen=True)
class Provenance:
    """What was audited, and where it came from."""

    name: Annotated[str, FileField("of the model: the target's, or its class")]
    target: Annotated[str, FileField("TARGET, as it was given or as seen from the working directory")]
    file: Annotated[str | None, FileField("the file it was found in, from its repository; `null` where there is none")]
    inputs_source: Annotated[str, FileField("where the inputs came from")]
    weights_source: Annotated[str, FileField("where the weights came from")]
    synthetic_inputs: Annotated[bool, FileField("whether the inputs are nobody's")] = False
    random_weights: Annotated[bool, FileField("whether the weights are nobody's")] = False

    @classmethod
    def of(cls, subject: Subject) -> Provenance:
        """What a subject says of itself."""
        same = {each.name: getattr(subject, each.name) for each in fields(cls) if each.name != "file"}
        return cls(file=subject.origin.path if subject.origin else None, **same)


@dataclass(frozen=True)
class Environment:
    """Where the numbers come from."""

    auditor: Annotated[str, FileField("version of the auditor")]
    torch: Annotated[str, FileField("version of PyTorch")]
    device: Annotated[str, FileField("`cpu`, or the GPU's name")]
    execution: Annotated[str, FileField("`native`: on a GPU; `emulated`: on a CPU", choices=("native", "emulated"))]
    seed: Annotated[int, FileField("of every random choice")]
    seconds: Annotated[Mapping[str, float], FileField("seconds of each stage, by name")] = empty()
    libraries: Annotated[Mapping[str, str], FileField("versions of CUDA, cuDNN and driver, or oneDNN")] = empty()
    flags: Annotated[Mapping[str, Any], FileField("the caller's torch flags; the audit's own FP32 is IEEE")] = empty()
    memory: Annotated[tuple[str, ...], FileField("what was done to hold no more than `--memory`")] = ()
    held: Annotated[str | None, FileField("the most that was resident under `--memory`")] = None


@dataclass(frozen=True)
class NodeReport:
    """Everything known about one node, formats keyed by name. exposed: strategies by format."""

    node: Annotated[Node, FileField("the operation")]
    findings: Annotated[tuple[str, ...], FileField("codes of the rules that fired on it")]
    verdicts: Annotated[Mapping[str, Verdict], FileField("by format: what is said of it, and why")]
    exposed: Annotated[Mapping[str, tuple[str, ...]], FileField("by format: strategies that would run it low")]
    errors: Annotated[Mapping[str, NodeError], FileField("by format: what it does to the operation itself")]
    contributions: Annotated[Mapping[str, Contribution], FileField("by format: how far it moves the outputs")]
    flops: Annotated[int, FileField("of matrix products and convolutions; 0 for others", least=0)]
    range: Annotated[Magnitudes | None, FileField("magnitudes of its FP32 result; `null` where that is not floating")]
    written: Annotated[bool, FileField("whether its largest magnitude is a literal, such as a mask's -1e9")] = False
    planned: Annotated[Dtypes | None, FileField("dtypes seen in a run under the recommended plan; `null`: none")] = None


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Everything an audit found; what every reporter reads, and `plan.json` and `measurements.json` store.

    live: the model and its batches, None where the audit was loaded from its files. programs: contents of files that are
    programs, by name.
    """

    subject: Annotated[Provenance, FileField("the model and its inputs")]
    live: Unwritten[Subject | None] = None
    parameters: Annotated[int, FileField("size of the parameters, shared ones once; `apply` refuses another", least=0)]
    structure: Annotated[str, FileField("digest of modules and parameters; `apply` refuses another")] = ""
    inputs: Annotated[tuple[str, ...], FileField("dtype and shape of each tensor of the first batch")]
    tied_parameters: Annotated[Groups, FileField("groups of names in the state dict that are one parameter")] = ()
    shared_modules: Annotated[Groups, FileField("groups of paths that are one module")] = ()
    formats: Annotated[tuple[str, ...], FileField("number formats that were audited")]
    max_error: Annotated[float, FileField("the error that a plan may have", least=0, exact=True)]
    metric: Annotated[str, FileField("what errors are measured in")]
    criteria: Annotated[tuple[str, ...], FileField("criteria that were set; errors are shares of what they allow")] = ()
    proposals: Annotated[tuple[Proposal, ...], FileField("criteria that nobody set: defaults and proposals")] = ()
    capture_method: Annotated[str, FileField("`path`: values choose the graph; `run`: not", choices=("run", "path"))]
    environment: Annotated[Environment, FileField("what ran the audit")]
    recommended: Annotated[str | None, FileField("name of the plan to use; `null`: FP32")]
    use: Annotated[str, FileField("what the recommended plan is for", choices=("inference", "training"))] = "inference"
    recommendation: Annotated[str, FileField("why, in one sentence")]
    plans: Annotated[Mapping[str, Plan], FileField("one per strategy and format, under names such as `autocast_bf16`")]
    baselines: Annotated[Mapping[str, Verification], FileField("runs without a plan, under the same names")]
    fp32_today: Annotated[Today | None, FileField("FP32 under the caller's own flags; `null`: it is IEEE")] = None
    timing: Annotated[Timing | None, FileField("what time and memory were measured on; `null`: they were not")] = None
    nodes: Annotated[tuple[NodeReport, ...], MeasurementField("every operation of the graph, in execution order")] = ()
    classes: Annotated[Mapping[str, str], MeasurementField("by path: classes of modules without operations")] = empty()
    graph_inputs: Annotated[tuple[str, ...], MeasurementField("inputs, by name in the captured graph")] = ()
    graph_outputs: Annotated[tuple[str, ...], MeasurementField("name in the graph of each returned tensor")] = ()
    weights: Annotated[tuple[Weight, ...], MeasurementField("magnitudes of every parameter and buffer")] = ()
    regions: Annotated[tuple[FlaggedRegion, ...], MeasurementField("connected flagged operations, run together")] = ()
    linearity: Annotated[tuple[Linearity, ...], MeasurementField("by format: predictions held against runs")] = ()
    decisions: Annotated[tuple[Decisions, ...], FileField("by format: what is decided inside the model")] = ()
    noise: Annotated[Noise | None, MeasurementField("how far FP32 is from itself when it is run again")] = None
    findings: Annotated[tuple[Finding, ...], FileField("every rule that fired, each place by itself")]
    contributions: Annotated[Contributions, FileField("largest by format, module, op")] = field(default_factory=dict)
    warnings: Annotated[tuple[str, ...], FileField("what limits this audit, in words")]
    training: Annotated[Training | None, FileField("what a training step meets; `null` in mode `inference`")] = None
    evaluation: Annotated[Evaluation | None, FileField("the user's own function; `null`: none was given")] = None
    generation: Annotated[Generation | None, FileField("tokens that plans are held to; `null`: none asked for")] = None
    command: Annotated[str, MeasurementField("what was called")] = ""
    programs: Unwritten[Mapping[str, bytes]] = field(default_factory=dict)
    plan_errors: Annotated[Mapping[str, float], MeasurementField("by node: error under the recommended plan")] = empty()

    def __repr__(self) -> str:
        """What it came to, in a few lines."""
        from ..report.reporters import summary

        return summary(self)

    def to_dict(self) -> dict[str, Any]:
        """What `plan.json` holds: what was decided, and why."""
        from ..document.codec import to_plan

        return to_plan(self)

    def to_measurements(self) -> dict[str, Any]:
        """What `measurements.json` holds: what was found of every operation, parameter and module."""
        from ..document.codec import to_measurements

        return to_measurements(self)

    def texts(self, directory: str | Path) -> dict[str, str | bytes]:
        """What `save` writes into the directory: texts, and programs in bytes, by the names of their files.

        Raises: AuditorError(slug="bad-format" or "bad-strategy") where a format or strategy of the audit is no longer registered.
        """
        from ..artefact.emit import emit
        from ..document.codec import texts
        from ..report.reporters import WRITTEN

        result: dict[str, str | bytes] = {
            **texts(self),
            **{name: made(self) for name, made in WRITTEN.items()},
            **self.programs,
        }
        if self.live is not None:
            result["patched_model.py"] = emit(
                self.live.origin, self.parameters, self.plans, self.recommended, Path(directory), self.structure
            )
        return {name: result[name] for name in (*FILES, *result) if name in result}

    def save(self, directory: str | Path, *, onnx: bool | str = False) -> tuple[Path, ...]:
        """Write report.html, plan.json, measurements.json, patched_model.py, findings.sarif and programs; returns their paths.

        onnx: an ONNX model of each program too, checked and run by onnxruntime; "low": with inputs and outputs in the
        plan's format. The files appear together, in place of those of an older audit; all others in the directory stay, and so does
        patched_model.py where the audit was loaded from files.
        Raises: AuditorError(slug="bad-output") where they cannot be written, "missing-onnx" or "no-program" where there can
        be no ONNX model, and what `texts` raises.
        """
        if onnx:
            from ..graphs.onnxfile import with_onnx

            return with_onnx(self, "fp32" if onnx is True else onnx).save(directory)
        from ..document.read import programs_in

        folder = path_of(directory, "the directory to save into")
        return write(folder, self.texts(folder), programs_in(folder))

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        from ..report.blocks import to_html
        from ..report.reporters import overview

        return to_html(overview(self))
