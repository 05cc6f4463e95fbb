"""What plan.json holds from its top on, and what stands in it for records that it does not hold as they are.

Nothing here needs torch until an audit is written: files are read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ..records import FORMAT_VERSION, Audit, Contribution, Magnitudes, NodeError
from ..records.written import Inlined, Written

Groups = tuple[tuple[str, ...], ...]
"""Names that are one thing, a parameter or a module."""


@dataclass(frozen=True)
class AuditedModel:
    """The model and its inputs."""

    name: Annotated[str, Written("of the model: the target's, or its class")]
    source: Annotated[str, Written("TARGET as it was given")]
    parameters: Annotated[
        int,
        Written(
            "how many numbers the model's parameters hold, shared ones once; `apply` refuses another count", least=0
        ),
    ]
    tied_parameters: Annotated[Groups, Written("groups of names in the state dict that are one parameter", later=True)]
    shared_modules: Annotated[Groups, Written("groups of paths that are one module", later=True)]
    inputs: Annotated[tuple[str, ...], Written("dtype and shape of each tensor of the first batch")]
    inputs_source: Annotated[str, Written("where the inputs came from")]
    weights_source: Annotated[str, Written("where the weights came from")]
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
            subject.name,
            subject.target,
            audit.parameters,
            tied_parameters(subject.model),
            shared_modules(subject.model),
            audit.inputs,
            subject.inputs_source,
            subject.weights_source,
            audit.capture_method,
        )


@dataclass(frozen=True)
class Budget:
    """What the outputs may be off by."""

    max_error: Annotated[
        float, Written("the error that the budget allows", finite=True, exact=True, schema={"exclusiveMinimum": 0})
    ]
    metric: Annotated[str, Written("what it is measured in")]


@dataclass(frozen=True)
class Document:
    """Everything in plan.json."""

    format_version: Annotated[int, Written(f"{FORMAT_VERSION}", schema={"const": FORMAT_VERSION})]
    subject: Annotated[AuditedModel, Written("the model and its inputs", needed="audit")]
    budget: Annotated[Budget, Written("the error that a plan may have", needed="audit", before="recommended")]
    warnings: Annotated[tuple[str, ...], Written("what limits this audit, in words", before="training")]
    audit: Annotated[Audit, Inlined()]

    @classmethod
    def of(cls, audit: Audit) -> Document:
        """What plan.json holds of an audit."""
        from ..loading.caveats import cautions

        warnings = (*cautions(audit.subject), *audit.warnings)
        return cls(FORMAT_VERSION, AuditedModel.of(audit), Budget(audit.max_error, audit.metric), warnings, audit)


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
        from ..formats.histogram import flushed, subnormal
        from ..formats.table import FORMATS

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
            "how `contribution` was found: `first-order`, or `re-run` of the step with this operation low",
            choices=("first-order", "re-run"),
        ),
    ]

    @classmethod
    def of(cls, found: Contribution) -> MovedGradients:
        """The same contribution."""
        return cls(found.isolated, found.backward, found.decided_by)


FORMS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "Range": (Range, Range.of),
    "Histogram": (Histogram, Histogram.of),
    "BackwardPass": (BackwardPass, BackwardPass.of),
    "MovedGradients": (MovedGradients, MovedGradients.of),
}
"""{`Written.form`: (what stands in the file for a record, how to make that of it)}."""


def tied_parameters(model: Any) -> Groups:
    """Names of each parameter that has more than one."""
    from ..state.members import named_parameters

    return _under_several_names(named_parameters(model))


def shared_modules(model: Any) -> Groups:
    """Paths of each module that has more than one."""
    from ..state.members import named_modules

    return _under_several_names(named_modules(model))


def _under_several_names(named: Iterable[tuple[str, Any]]) -> Groups:
    names: dict[int, list[str]] = {}
    for name, item in named:
        names.setdefault(id(item), []).append(name)
    return tuple(tuple(found) for found in names.values() if len(found) > 1)
