"""Programs as ONNX models: written, checked, and run by onnxruntime in a fresh process."""

from __future__ import annotations

import io
import logging
import math
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import AuditorError, MeasureError, first_line
from ..folder import own
from ..isolation.answer import answer
from ..numerics.formats import label
from ..numerics.metrics import output_error
from ..raised import let_through
from ..records import Audit, Batch, Onnx, Plan, Program, Subject
from ..verify import ONNX, Answers, NotHandedOver, Verifier
from ..verify.loaders import AS_IT_IS, PROVIDER
from .onnxmodel import counted, lowered_ends, tidied
from .onnxrounded import rounded

NEEDED = ("onnx", "onnxscript", "onnxruntime")
"""Packages that write, check and run these files."""


def require() -> None:
    """Raises: AuditorError(slug="missing-onnx") where a package that is needed is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise AuditorError(
            f"ONNX models need {' and '.join(missing)}, which is not installed: pip install 'model-precision-auditor[onnx]'",
            slug="missing-onnx",
        )


def with_onnx(audit: Audit, ends: str = "fp32") -> Audit:
    """The audit with an ONNX model for each of its programs, checked, and run on the inputs that the program was judged on.

    ends: "fp32", or "low": floating inputs and outputs in the plan's format. Raises: AuditorError(slug="missing-onnx" |
    "no-program" | "bad-option").
    """
    if ends not in ("fp32", "low"):
        raise AuditorError(f"inputs and outputs of an ONNX model are fp32 or low, not {ends}", slug="bad-option")
    plans = {name: plan for name, plan in audit.plans.items() if plan.program and plan.program.file in audit.programs}
    if not plans or audit.live is None:
        raise AuditorError(
            "ONNX models are made of plans of strategy graph while the audit has its model: ask for strategies graph.",
            slug="no-program",
        )
    require()
    written = {name: _written(audit, plan, ends) for name, plan in plans.items()}
    files = {f"{name}{ONNX}": content for name, content in written.items() if isinstance(content, bytes)}
    ran = _ran(audit, plans, files) if files else {}
    told = {
        name: replace(plan, program=_told(plan, ends, written[name], ran.get(name), ran.get(f"{name}{AS_IT_IS}")))
        for name, plan in plans.items()
    }
    return replace(audit, plans={**audit.plans, **told}, programs={**audit.programs, **files})


def _written(audit: Audit, plan: Plan, ends: str) -> bytes | str:
    """The model, or why there is none."""
    import onnx

    assert plan.program is not None
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.export.load(io.BytesIO(audit.programs[plan.program.file]))
            made = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
            assert made is not None
            model = tidied(made.model)
            if ends == "low":
                lowered_ends(model, plan.format)
            onnx.checker.check_model(model, full_check=True)
            content: bytes = model.SerializeToString()
            return content
    except Exception as error:
        let_through(error)
        return f"it could not be written: {first_line(_cause(error))[:200]}"
    finally:
        logging.disable(level)


def _cause(error: BaseException) -> BaseException:
    """Where it began: what torch's exporter raises tells of the steps of an export."""
    return error if error.__cause__ is None else _cause(error.__cause__)


def _ran(audit: Audit, plans: Mapping[str, Plan], files: Mapping[str, bytes]) -> dict[str, float | str]:
    """The error of each model and of each as a GPU rounds, or why it has none. files: the models."""
    assert audit.live is not None
    batches = _batches(audit.live, next(iter(plans.values())))
    seed = audit.environment.seed
    expected = [[x.cpu() for x in answer(audit.live.model, batch, seed=seed)] for batch in batches]
    tried = {name.removesuffix(ONNX): content for name, content in files.items()}
    tried |= {
        f"{name}{AS_IT_IS}": found for name in list(tried) if (found := _rounding(tried[name], plans[name].format))
    }
    with tempfile.TemporaryDirectory(prefix=own(), ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        for name, content in tried.items():
            (folder / f"{name}{ONNX}").write_bytes(content)
        given: Any = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, list(batches))
        try:
            with Verifier(given, folder, gradients=False) as verifier:
                answers = verifier.answers(folder, list(tried))
        except NotHandedOver as error:
            return dict.fromkeys(tried, f"its inputs cannot be handed to another process: {first_line(error)}")
    return {name: _error(expected, found) for name, found in answers.items()}


def _rounding(content: bytes, format: str) -> bytes | None:
    """The model rounding as a GPU does; None where that cannot be written."""
    try:
        return rounded(content, format)
    except Exception as error:
        let_through(error)
        return None


def _batches(live: Subject, plan: Plan) -> tuple[Batch, ...]:
    """What the plan was judged on."""
    held = plan.verification is not None and plan.verification.inputs == "held-out"
    return live.held_out if held else live.batches


def _error(expected: list[list[torch.Tensor]], found: Answers | str) -> float | str:
    if isinstance(found, str):
        return found
    try:
        errors = [output_error(r, c) for r, c in zip(expected, found.outputs, strict=True)]
    except MeasureError as error:
        return str(error)
    worst = math.nan if any(map(math.isnan, errors)) else max(errors)
    return worst if math.isfinite(worst) else "an output is Inf or NaN where FP32 is finite"


def _told(
    plan: Plan, ends: str, written: bytes | str, ran: float | str | None, as_rounded: float | str | None
) -> Program:
    """The plan's program, with what is known of it as an ONNX model."""
    import onnxruntime

    assert plan.program is not None
    nodes, high, casts = counted(written) if isinstance(written, bytes) else (0, 0, 0)
    failure = written if isinstance(written, str) else ran if isinstance(ran, str) else None
    if failure and "NOT_IMPLEMENTED" in failure:
        lacking = failure.partition("Could not find an implementation for ")[2].partition(" ")[0]
        failure = f"onnxruntime's CPU provider has no {label(plan.format)} kernel for {lacking or 'an operation'}; its types are checked"
    checked = plan.verification
    found = Onnx(
        f"{plan.name}{ONNX}" if isinstance(written, bytes) else "",
        ends,
        nodes,
        high,
        casts,
        f"onnxruntime {onnxruntime.__version__}, {PROVIDER}",
        ran if isinstance(ran, float) else None,
        None if checked is None else checked.error if checked.joint is None else checked.joint,
        failure,
        as_rounded if isinstance(as_rounded, float) else None,
    )
    return replace(plan.program, onnx=found)
