"""The training section: its charts, tables and answers, and a loop to copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..numerics.formats import FORMATS
from ..numerics.histogram import flushed, subnormal
from ..records.audit import Audit
from ..records.training import BackwardNode, ModuleGradients, Training
from ..training.window import scaler_code
from .gradients import GradientChart, WindowChart, gradient_chart, window_chart
from .words import label, percent, scope

ROWS = 10
FP16 = FORMATS["fp16"]


@dataclass(frozen=True)
class ModuleRow:
    """One module's low gradients, or all of its gradients where none is low."""

    module: str
    largest: float
    flushed: str
    subnormal: str
    scaled: str
    bits: str


@dataclass(frozen=True)
class Mover:
    """An operation that disturbs the gradients of the parameters."""

    node: BackwardNode
    format: str
    moved: float
    backward: float


@dataclass(frozen=True)
class TrainingView:
    """Everything the section shows."""

    found: Training
    gradients: GradientChart | None
    window: WindowChart | None
    modules: tuple[ModuleRow, ...]
    modules_left: int
    movers: tuple[Mover, ...]
    code: str | None
    rates: tuple[str, ...]
    adam: tuple[str, ...]
    sgd: tuple[str, ...]


def training_view(audit: Audit) -> TrainingView | None:
    """The section's data; None for an audit in mode inference."""
    found = audit.training
    if found is None:
        return None
    ordered = sorted(found.modules, key=lambda m: (-_lost(m), -m.activations.max_abs))
    init = found.fp16.init if found.fp16 else None
    outlook = found.bf16
    return TrainingView(
        found,
        gradient_chart(found),
        window_chart(found),
        tuple(_row(module, init) for module in ordered[:ROWS]),
        max(0, len(ordered) - ROWS),
        _movers(found),
        loop_code(audit),
        tuple(f"{rate:g}" for rate in outlook.lost_adam) if outlook else (),
        tuple(percent(share) for share in outlook.lost_adam.values()) if outlook else (),
        tuple(percent(share) for share in outlook.lost_sgd.values()) if outlook else (),
    )


def _lost(module: ModuleGradients) -> int:
    """How many of its low gradients are flushed."""
    return round(flushed(module.low.exponents, FP16) * module.low.nonzero) if module.low else 0


def _row(module: ModuleGradients, init: float | None) -> ModuleRow:
    spread = module.low or module.activations
    exponents = spread.exponents
    shift = round(math.log2(init)) if init else 0
    rounding = spread.rounding.get("bf16", 0.0)
    return ModuleRow(
        scope(module.module),
        spread.max_abs,
        percent(flushed(exponents, FP16)) if module.low else "FP32",
        percent(subnormal(exponents, FP16)) if module.low else "FP32",
        percent(flushed(exponents, FP16, shift)) if module.low else "FP32",
        f"{-math.log2(rounding):.1f}" if rounding else "all",
    )


def _movers(found: Training) -> tuple[Mover, ...]:
    rows = [
        Mover(node, label(fmt), moved.isolated, moved.backward)
        for node in found.nodes
        for fmt, moved in node.contributions.items()
        if moved.isolated and math.isfinite(moved.isolated)
    ]
    return tuple(sorted(rows, key=lambda row: -row.moved)[:ROWS])


def training_plan(audit: Audit) -> str | None:
    """The plan to train under: that of autocast in the format to train in, if the audit has one that holds."""
    found = audit.training
    plan = audit.plans.get(f"autocast_{found.format}") if found else None
    return plan.name if plan is not None and plan.verified else None


def loop_code(audit: Audit) -> str | None:
    """A training loop for the recommended format; None where training stays FP32.

    It expects `model`, `loader` and `loss_fn`, and `patched_model.py` beside it.
    """
    found = audit.training
    if found is None or found.format is None:
        return None
    plan = training_plan(audit)
    scaler = found.fp16.init if FORMATS[found.format].loss_scaling and found.fp16 else None
    dtype = f"torch.{FORMATS[found.format].storage}"
    own = found.loss_source == "the model's own loss"
    several = plan is not None and not own and found.returned == "tensors"
    ahead, tree = (["from copy import copy", "from dataclasses import fields, is_dataclass", ""], [_TREE])
    lines = [*(ahead if several else []), "import torch", *(tree if several else [])]
    lines += [*(["import patched_model"] if plan else []), "", *(_IN_FP32 if several else [])]
    lines += ['device = "cuda" if torch.cuda.is_available() else "cpu"']
    if plan:
        lines += [
            "# The patched model has autocast regions of its own: put no torch.autocast around it.",
            f"model = patched_model.apply(model, plan={plan!r})",
        ]
    lines += [
        "model = model.to(device).train()  # weights stay FP32: they are the master copy",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
    ]
    if scaler is not None:
        lines += [f"scaler = torch.amp.{scaler_code(scaler).replace('(', '(device, ', 1)}"]
    lines += ["", "for batch in loader:" if own else "for inputs, targets in loader:"]
    lines += ["    optimizer.zero_grad(set_to_none=True)", *_forward(plan is not None, own, dtype, found.returned)]
    if scaler is None:
        return "\n".join([*lines, "    loss.backward()", *_clip(), "    optimizer.step()", ""])
    stepped = ["    scaler.unscale_(optimizer)  # before clipping", *_clip(), "    scaler.step(optimizer)"]
    return "\n".join([*lines, "    scaler.scale(loss).backward()", *stepped, "    scaler.update()", ""])


def _forward(planned: bool, own: bool, dtype: str, returned: str) -> list[str]:
    """From the batch to its loss, which a plan has outside of its regions, in FP32."""
    inside = {"attribute": "model(**batch).loss", "mapping": 'model(**batch)["loss"]'}.get(returned, "model(**batch)")
    if not own:
        raised = {"tensor": "model(inputs).float()", "tensors": "in_fp32(model(inputs))"}[returned]
        inside = f"loss_fn({raised if planned else 'model(inputs)'}, targets)"
    if planned:
        return [f"    loss = {inside}" + ("" if own else "  # in FP32")]
    return [f"    with torch.autocast(device, dtype={dtype}):", f"        loss = {inside}"]


_TREE = "from torch.utils._pytree import tree_map"
_IN_FP32 = [
    "",
    "def in_fp32(outputs):",
    '    """The outputs, whatever structure they are in, for a loss in FP32."""',
    "    def raised(x):",
    "        if torch.is_tensor(x):",
    "            return x.float() if x.is_floating_point() else x",
    "        if not is_dataclass(x) or isinstance(x, type):",
    "            return x",
    "        wide = copy(x)",
    "        for item in fields(x):",
    "            object.__setattr__(wide, item.name, in_fp32(getattr(x, item.name)))",
    "        return wide",
    "",
    "    return tree_map(raised, outputs)",
    "",
]


def _clip() -> list[str]:
    return ["    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]


def training_headline(audit: Audit) -> str | None:
    """How to train, in one sentence; None for an audit in mode inference."""
    found = audit.training
    if found is None:
        return None
    if found.format is None:
        return "Train it in FP32."
    plan = training_plan(audit)
    under = "under that plan" if plan is not None and plan == audit.recommended else "under autocast"
    if FORMATS[found.format].loss_scaling and found.fp16 is not None and found.fp16.init is not None:
        return f"Train it in {label(found.format)} {under}, with a loss scale from {found.fp16.init:,.10g}."
    return f"Train it in {label(found.format)} {under}, without a loss scale."
