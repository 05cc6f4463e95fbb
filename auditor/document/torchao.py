"""Applies plans of quantization schemes to a live model: runs their code for torchao."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from torch import nn

from ..artefact.libraries import LIBRARIES, applicable, code_of, quantized_plan
from ..errors import PlanError, first_line
from ..isolation import isolate
from ..isolation.process import quietly
from ..records import Audit
from .read import audit_in


def quantized_audit(plan: Any, name: str | None) -> Audit | None:
    """The audit, if `name` is one of its plans of quantization schemes; else None. Raises: PlanError."""
    is_document = isinstance(plan, Mapping) and "plans" in plan
    if not name or not (is_document or isinstance(plan, Audit | str | PathLike)):
        return None
    audit = audit_in(plan)
    names = [quantized.name for quantized in audit.quantized_plans]
    return audit if name in names else None


def quantize(model: nn.Module, audit: Audit, name: str, then: Callable[[], object] = lambda: None) -> nn.Module:
    """Quantize `model` in place by a plan's torchao code. then: a check, called after a trial that is undone. Raises:
    PlanError(slug="no-arithmetic"), with the model unchanged."""
    library, plan, names = LIBRARIES["torchao"], quantized_plan(audit, name), dict[str, Any]()
    if name not in applicable(audit):
        raise PlanError(
            f"{name!r} cannot be applied to a model: see quantized/{name}/{library.file}.", slug="no-arithmetic"
        )
    try:
        with quietly():  # torchao logs which libraries for GPUs it does not find
            exec(code_of(audit, library, plan), names)
        with isolate(model):  # torchao may fail halfway
            names["quantize"](model)
            then()
        result: nn.Module = names["quantize"](model)
    except Exception as error:
        message = f"torchao cannot apply the plan {name!r} to this model: {first_line(error)}"
        raise PlanError(message, slug="no-arithmetic") from error
    return result
