"""What the files hold from their top on, and what stands in them for records that they do not hold as they are.

Nothing here needs torch until an audit is written: files are read without it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from ..records import FORMAT_VERSION, Audit, Contribution, Finding, Magnitudes, NodeError
from ..records.audit import Groups
from ..records.graph import CalledFrom
from ..records.measure import DECIDED_BY, Bearing, CauseName, Followed, Severity
from ..records.written import Inlined, Written
from .budget import Budget
from .places import portable, shown
from .steady import BAND, Contributions, watched


@dataclass(frozen=True)
class AuditedModel:
    """The model and its inputs."""

    name: Annotated[str, Written("of the model: the target's, or its class")]
    source: Annotated[str, Written("TARGET, as it was given or as seen from the working directory")]
    file: Annotated[str | None, Written("the file it was found in, from its repository; `null` where there is none")]
    parameters: Annotated[
        int,
        Written(
            "how many numbers the model's parameters hold, shared ones once; `apply` refuses another count", least=0
        ),
    ]
    structure: Annotated[
        str, Written("digest of the modules' classes and the parameters' shapes; `apply` refuses another")
    ]
    tied_parameters: Annotated[Groups, Written("groups of names in the state dict that are one parameter")]
    shared_modules: Annotated[Groups, Written("groups of paths that are one module")]
    inputs: Annotated[tuple[str, ...], Written("dtype and shape of each tensor of the first batch")]
    inputs_source: Annotated[str, Written("where the inputs came from")]
    synthetic_inputs: Annotated[bool, Written("whether they are nobody's")]
    weights_source: Annotated[str, Written("where the weights came from")]
    random_weights: Annotated[bool, Written("whether they are nobody's")]
    capture: Annotated[
        str,
        Written(
            "one run was recorded. `run`: nothing in it depends on values; `path`: Python or a shape did, and other inputs "
            "may take other paths",
            choices=("run", "path"),
        ),
    ]

    @classmethod
    def of(cls, audit: Audit) -> AuditedModel:
        """What an audit says of its model."""
        subject = audit.subject
        return cls(
            name=subject.name,
            source=portable(subject.target),
            file=shown(subject.origin.path) if subject.origin and subject.origin.path else None,
            parameters=audit.parameters,
            structure=audit.structure,
            tied_parameters=audit.tied_parameters,
            shared_modules=audit.shared_modules,
            inputs=audit.inputs,
            inputs_source=portable(subject.inputs_source),
            synthetic_inputs=subject.synthetic_inputs,
            weights_source=portable(subject.weights_source),
            random_weights=subject.random_weights,
            capture=audit.capture_method,
        )


VERSION = Annotated[int, Written(f"{FORMAT_VERSION}", schema={"const": FORMAT_VERSION})]
SUBJECT = Annotated[AuditedModel, Written("the model and its inputs", needed="audit")]
BUDGET = Annotated[Budget, Written("the error that a plan may have", needed="audit", before="recommended")]
WARNINGS = Annotated[tuple[str, ...], Written("what limits this audit, in words", before="training")]


@dataclass(frozen=True)
class FindingKind:
    """Findings that are alike: one rule, at one line, on one kind of operation."""

    rule: Annotated[str, Written("the rule's code, see [rules.md](rules.md)", needed="audit")]
    name: Annotated[str, Written("the rule's name", needed="audit")]
    severity: Severity
    confidence: Annotated[
        str, Written("`high` where measured to be unsafe, else as its rule says", choices=("high", "medium", "low"))
    ]
    formats: Annotated[tuple[str, ...], Written("formats it speaks of")]
    source: Annotated[str | None, Written("line that wrote it, as for operations")]
    op: Annotated[str, Written("ATen overload of the node", needed="audit")]
    owner: Annotated[str, Written("module of the first node that it fired on", needed="audit")]
    node: Annotated[str, Written("that node, by its name in the captured graph")]
    also_in: Annotated[tuple[str, ...], Written("modules of the other nodes that it fired on, a path for each")]
    message: Annotated[str, Written("what is wrong at the first, with this model's numbers", needed="audit")]
    agrees: Annotated[bool | None, Written("whether the measurement bears it out; `null` where there is none")]
    cause: CauseName = ""
    plan: Followed = None
    bearing: Bearing = None
    called_from: CalledFrom = None


@dataclass(frozen=True)
class PlanFile:
    """Everything in plan.json: what was decided and what that rests on."""

    format_version: VERSION
    subject: SUBJECT
    budget: BUDGET
    findings: Annotated[
        tuple[FindingKind, ...], Written("every rule that fired, by kind and line", needed="audit", before="training")
    ]
    contributions: Annotated[
        Contributions,
        Written(
            "what the next audit compares with: by format, module and operation the largest contribution (relative L2), of "
            f"those that are sensitive or would be if they were {BAND:g} times as large; `null`: not finite",
            before="training",
        ),
    ]
    warnings: WARNINGS
    audit: Annotated[Audit, Inlined()]

    @classmethod
    def of(cls, audit: Audit) -> PlanFile:
        """What plan.json holds of an audit."""
        kinds = kinds_of(audit.findings)
        return cls(
            FORMAT_VERSION,
            AuditedModel.of(audit),
            Budget(audit.max_error, audit.metric, audit.criteria),
            kinds,
            watched(audit),
            limits_of(audit),
            audit,
        )


@dataclass(frozen=True)
class Measurements:
    """Everything in measurements.json: what was found of every operation, parameter and module."""

    format_version: Annotated[int, Written(f"{FORMAT_VERSION}", measured=True, schema={"const": FORMAT_VERSION})]
    plan: Annotated[
        str,
        Written(
            "SHA-256 of the plan.json that was written with it, as JSON with sorted keys and without spaces, without "
            "`environment.seconds` and `environment.held`",
            measured=True,
        ),
    ]
    not_finite: Annotated[
        Mapping[str, tuple[str, ...]],
        Written("JSON pointers to what is `null` in either file for being `inf`, `-inf` or `nan`", measured=True),
    ]
    audit: Annotated[Audit, Inlined()]

    @classmethod
    def of(cls, audit: Audit, plan: Any) -> Measurements:
        """What measurements.json holds of an audit. plan: the document that plan.json holds."""
        return cls(FORMAT_VERSION, digest(plan), {}, audit)


@dataclass(frozen=True)
class Document:
    """Both in one, as a program reads it from stdout."""

    format_version: VERSION
    subject: SUBJECT
    budget: BUDGET
    warnings: WARNINGS
    audit: Annotated[Audit, Inlined()]

    @classmethod
    def of(cls, audit: Audit) -> Document:
        """What both files hold of an audit."""
        return cls(
            FORMAT_VERSION,
            AuditedModel.of(audit),
            Budget(audit.max_error, audit.metric, audit.criteria),
            limits_of(audit),
            audit,
        )


VARYING = ("seconds", "held")
"""Keys of `environment` in plan.json that another audit of the same has otherwise: what it took."""


def steady(plan: Any) -> Any:
    """What plan.json holds, but for what another audit of the same has otherwise."""
    environment = plan.get("environment") if isinstance(plan, Mapping) else None
    if not isinstance(environment, Mapping):
        return plan
    return {**plan, "environment": {key: value for key, value in environment.items() if key not in VARYING}}


def digest(plan: Any) -> str:
    """What tells whether plan.json is still the one that measurements were written with."""
    text = json.dumps(steady(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def limits_of(audit: Audit) -> tuple[str, ...]:
    """What limits an audit, in words."""
    from ..loading.caveats import cautions

    return (*cautions(audit.subject), *audit.warnings)


def kinds_of(findings: Iterable[Finding]) -> tuple[FindingKind, ...]:
    """Findings that are alike put together, in the order of the first of each."""
    alike: dict[Any, list[Finding]] = {}
    for found in findings:
        line = found.source, found.called_from
        said = found.severity, found.confidence, found.formats, found.agrees, found.cause, found.bearing
        alike.setdefault((found.rule, found.op, line, said), []).append(found)
    return tuple(_kind(first, tuple(other.owner for other in others)) for first, *others in alike.values())


def _kind(first: Finding, also_in: tuple[str, ...]) -> FindingKind:
    shared = {item.name: getattr(first, item.name) for item in fields(FindingKind) if item.name != "also_in"}
    return FindingKind(**shared, also_in=also_in)


@dataclass(frozen=True)
class Range:
    """Magnitudes of values in FP32."""

    max_abs: Annotated[float, Written("the largest finite magnitude", least=0, finite=True)]
    min_abs: Annotated[float, Written("the smallest magnitude that is not zero", least=0, finite=True)]
    zeros: Annotated[float, Written("share of exact zeros", least=0, most=1, finite=True)]
    exponents: Annotated[
        Mapping[int, int],
        Written(
            '`{"e": how many}`: numbers with 2^e <= magnitude < 2^(e+1); -127 holds FP32\'s subnormal numbers', least=1
        ),
    ]

    @classmethod
    def of(cls, found: Magnitudes) -> Range:
        """The same magnitudes."""
        return cls(found.max_abs, found.min_abs, found.zero_share, found.exponents)

    def back(self) -> Magnitudes:
        """With as many zeros as make the share."""
        some = sum(self.exponents.values())
        zeros = round(self.zeros * some / (1 - self.zeros)) if self.zeros < 1 else 1
        return Magnitudes(self.max_abs, self.min_abs, zeros, self.exponents)


@dataclass(frozen=True)
class Histogram:
    """Magnitudes of a training step as the file has them: with what the low formats do to them, unscaled."""

    exponents: Annotated[Mapping[int, int], Written("count of entries by floor(log2 of their magnitude)", least=1)]
    zeros: Annotated[int, Written("entries that are zero", least=0)]
    nonfinite: Annotated[int, Written("entries that are Inf or NaN", least=0)]
    max_abs: Annotated[float, Written("largest magnitude")]
    norm: Annotated[float, Written("L2 norm")]
    fp16_flushed: Annotated[
        float, Written("share of the entries that FP16 turns to zero without a scale", least=0, most=1)
    ]
    fp16_subnormal: Annotated[
        float, Written("share of the entries that FP16 keeps with fewer bits without a scale", least=0, most=1)
    ]
    bf16_rounding: Annotated[
        float | None,
        Written("relative L2 error of rounding them to BF16, range aside; its negative log2 is the bits that stay"),
    ]
    fp16_rounding: Annotated[float | None, Written("the same for FP16")]

    @classmethod
    def of(cls, found: Magnitudes) -> Histogram:
        """The same magnitudes."""
        from ..numerics.formats import FORMATS
        from ..numerics.histogram import flushed, subnormal

        fp16 = FORMATS["fp16"]
        return cls(
            found.exponents,
            found.zeros,
            found.nonfinite,
            found.max_abs,
            found.norm,
            flushed(found.exponents, fp16),
            subnormal(found.exponents, fp16),
            found.rounding.get("bf16"),
            found.rounding.get("fp16"),
        )

    def back(self) -> Magnitudes:
        """With the power of two below the smallest magnitude as the smallest."""
        low = {"bf16": self.bf16_rounding, "fp16": self.fp16_rounding}
        rounding = {name: error for name, error in low.items() if error is not None}
        least = 2.0 ** min(self.exponents, default=-math.inf)
        return Magnitudes(self.max_abs, least, self.zeros, self.exponents, self.nonfinite, self.norm, rounding)


@dataclass(frozen=True)
class BackwardPass:
    """What one operation hands to its inputs in one format, on the FP32 values and gradients rounded to it."""

    error: Annotated[float | None, Written("relative L2 error of what it hands to its inputs")]
    nonfinite: Annotated[int, Written("entries of that which are finite in FP32 and not in the format", least=0)]
    unsupported: Annotated[str | None, Written("why it cannot run in the format")]

    @classmethod
    def of(cls, found: NodeError) -> BackwardPass:
        """The same error."""
        return cls(found.local_error, found.overflow + found.nan, found.unsupported)

    def back(self) -> NodeError:
        """With all that is not finite as overflow."""
        return NodeError(local_error=self.error, overflow=self.nonfinite, unsupported=self.unsupported)


@dataclass(frozen=True)
class MovedGradients:
    """How far one operation in one format moves the gradients."""

    contribution: Annotated[
        float,
        Written(
            "how far its error, made forwards and backwards, moves the gradients of all parameters (relative L2); `null` "
            "where it was not attributed"
        ),
    ]
    contribution_backward: Annotated[float, Written("the part of it that is made backwards")]
    decided_by: Annotated[
        str,
        Written(
            "how `contribution` was found: `first-order`: predicted; `re-run` of the step with this operation low",
            choices=DECIDED_BY,
        ),
    ]

    @classmethod
    def of(cls, found: Contribution) -> MovedGradients:
        """The same contribution."""
        return cls(found.isolated, found.backward, found.decided_by)

    def back(self) -> Contribution:
        """Without what was not asked for of gradients."""
        own = math.sqrt(max(self.contribution**2 - self.contribution_backward**2, 0.0))
        return Contribution(self.contribution, own, 0.0, self.decided_by, backward=self.contribution_backward)


@dataclass(frozen=True)
class Form:
    """What stands in a file for a value. of: it, made of the value; back: a value as near to the first as it allows."""

    shown: type
    of: Callable[[Any], Any]
    back: Callable[[Any], Any]


FORMS: dict[str, Form] = {
    "Range": Form(Range, Range.of, Range.back),
    "Histogram": Form(Histogram, Histogram.of, Histogram.back),
    "BackwardPass": Form(BackwardPass, BackwardPass.of, BackwardPass.back),
    "MovedGradients": Form(MovedGradients, MovedGradients.of, MovedGradients.back),
    "Place": Form(str, shown, str),
}
"""{`Written.form`: what it stands for}."""


def tied_parameters(model: Any) -> Groups:
    """Names of each parameter that has more than one."""
    from ..isolation.members import named_parameters

    return _under_several_names(named_parameters(model))


def shared_modules(model: Any) -> Groups:
    """Paths of each module that has more than one."""
    from ..isolation.members import named_modules

    return _under_several_names(named_modules(model))


def _under_several_names(named: Iterable[tuple[str, Any]]) -> Groups:
    names: dict[int, list[str]] = {}
    for name, item in named:
        names.setdefault(id(item), []).append(name)
    return tuple(tuple(found) for found in names.values() if len(found) > 1)
