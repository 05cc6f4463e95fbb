"""What to do next, in one sentence that holds for this audit."""

from __future__ import annotations

import math
from pathlib import Path

from ..numerics.formats import runs
from ..plan.recommend import outcome
from ..records.audit import Audit
from .criteria import advice, loosest, valued
from .findings import causes
from .words import label, op, ratio


def following(audit: Audit, directory: Path) -> str:
    """The next step. directory: where the files of the audit are."""
    report = directory / "report.html"
    if audit.subject.random_weights and audit.live and audit.parameters > 0:
        return "audit it again with its trained weights (--weights FILE): what was measured is of random ones."
    if audit.training is not None and audit.training.format is not None:
        return f"train with the loop in {report}, section Training."
    plan = audit.plans.get(audit.recommended or "")
    if plan is not None and plan.program is not None:
        return f"load the program: torch.export.load({str(directory / plan.program.file)!r}).module() is called as the model is."
    if audit.recommended is not None:
        return f"put {directory} on your path; `import patched_model` and `patched_model.build()` give the model under this plan."
    if not any(map(runs, audit.formats)):
        return "audit a format that torch computes in: --formats fp16,bf16."
    if outcome(audit.plans, audit.use) == "loses":
        return f"{(said := advice(audit))[0].lower()}{said[1:]}"
    first = next(iter(causes(audit).wanting), None)
    if first is not None:
        where = first.worst.source or op(first.worst.op)
        return f"repair {first.worst.rule} at {where}, and audit again; `python -m auditor explain {first.worst.rule}` says how."
    return _other_options(audit, report)


def _other_options(audit: Audit, report: Path) -> str:
    """What to ask for where no plan holds and nothing is to be repaired."""
    if (broken := loosest(audit)) is not None:
        name, one = broken
        written = f"{one.output}: {one.kind} {one.sign} {one.limit:.12g}"
        return f"loosen '{written}', of the criteria: with {_plain(audit, name)} it comes to {valued(one)}."
    reached = {
        name: found.measured_error
        for name, found in audit.baselines.items()
        if found.finite and found.measured_error is not None and math.isfinite(found.measured_error)
    }
    if reached:
        name = min(reached, key=lambda name: reached[name])
        return f"allow more with --max-error {_allowing(reached[name])}: {_plain(audit, name)} is off by {ratio(reached[name])}."
    if "bf16" not in audit.formats:
        return "audit BF16 as well, which has the range of FP32: --formats fp16,bf16."
    return f"read {report}: its plans say what each of them failed at."


def _plain(audit: Audit, name: str) -> str:
    plan = audit.plans.get(name)
    return f"plain {label(plan.format)} ({plan.strategy})" if plan else name


def _allowing(error: float) -> str:
    """A budget of two digits that an error is within."""
    step = 10.0 ** (math.floor(math.log10(error)) - 1) if error > 0 else 1e-6
    return f"{math.ceil(error / step * 1.02) * step:.2g}"
