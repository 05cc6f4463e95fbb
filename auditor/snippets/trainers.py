"""Code that trains a model under a plan: with torch.amp.GradScaler, or a precision plugin of Lightning."""

from __future__ import annotations

from ..artefact.text import comment
from ..numerics.formats import FORMATS
from ..records import Audit, Plan
from .offer import Tool, dtype_text

_PATCHED_NOTE = (
    "patched_model.py is in the directory of plan.json. The patched model has its own autocast regions: "
    "put no torch.autocast around it. If the loss is computed outside the model, compute it in FP32, from outputs "
    "converted with .float()."
)
_USUAL_SCALE = 65536.0
_FP16_NOTE = (
    "Gradients below 3e-8 become zero in FP16, so the loss is scaled. The scale starts at {scale:.10g}, halves "
    "whenever a gradient overflows and doubles after 2000 steps without overflow; steps that overflow are skipped. If the "
    "scale keeps falling, some gradient exceeds the range of FP16 at every scale."
)
_MEASURED = "The initial scale was determined from this model's gradients."
_GUESSED = "The initial scale is torch's default: an audit with --mode training determines the scale for this model."
_BF16_NOTE = "BF16 has the range of FP32 and needs no scaling: the disabled scaler changes nothing."

_ANY_DEVICE = '"cuda" if torch.cuda.is_available() else "cpu"'
_STEP = '''
import torch
{imported}
DEVICE = {device}


def prepare(model):
    """Return the model ready to train, and its scaler. The weights stay FP32, as the master copy."""
    model = {model}.to(DEVICE).train()
    return model, torch.amp.GradScaler(DEVICE, init_scale={scale!r}, enabled={enabled})


def train_step(model, scaler, optimizer, compute_loss, batch, max_norm=None):
    """compute_loss(model, batch) calls the model and returns an FP32 scalar."""
    optimizer.zero_grad(set_to_none=True)
    {loss}
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()
'''


def training_code(audit: Audit, fmt: str, plan: str | None) -> str:
    """Code that defines `prepare(model)` and `train_step(...)` under a plan, or under plain autocast without a plan."""
    measured_scale = None
    if audit.training and audit.training.fp16:
        measured_scale = audit.training.fp16.init
    scale = measured_scale or _USUAL_SCALE

    notes = list[str]()
    imported = ""
    model = "model"
    device = _ANY_DEVICE if audit.cpu is None else repr("cpu")
    autocast = f"with torch.autocast(DEVICE, dtype={dtype_text(fmt)}):"
    loss = f"{autocast}\n        loss = compute_loss(model, batch)"
    if plan:
        notes.append(_PATCHED_NOTE)
        imported = "\nimport patched_model\n"
        model = f"patched_model.apply(model, plan={plan!r})"
        loss = "loss = compute_loss(model, batch)"
    is_scaled = FORMATS[fmt].loss_scaling
    if is_scaled:
        notes += [_FP16_NOTE.format(scale=scale), _MEASURED if measured_scale else _GUESSED]
    else:
        notes.append(_BF16_NOTE)
    code = _STEP.format(imported=imported, model=model, device=device, scale=scale, enabled=is_scaled, loss=loss)
    return comment(*notes) + code


_LIGHTNING_NOTE = (
    "patched_model.py is in the directory of plan.json. `part` names the attribute of the LightningModule that was audited; "
    "omit `part` if the LightningModule itself was audited. The plan applies only inside calls of the audited module and its methods."
)
_AUTOCAST_NOTE = (
    "Other code in training_step, such as the loss, runs under Lightning's autocast, which "
    "precision={setting!r} configures. For FP16 this includes Lightning's GradScaler."
)
_CAST_NOTE = (
    "A cast plan stores weights in low precision and is for trainer.validate, test and predict. It is not for training: FP16 and BF16 "
    "weights lose small updates, and Lightning keeps no FP32 copy. Train under an autocast plan."
)

_PLUGIN = """from lightning.pytorch.plugins.precision import {base}

import patched_model


class PlanPrecision({base}):
    def __init__(self, part=""{device}):
        super().__init__({arguments})
        self.part = part

    def convert_module(self, module):
        patched_model.apply(module.get_submodule(self.part), plan={name!r})
        return module


# trainer = lightning.Trainer(plugins=[PlanPrecision("model")])
"""


def _for_lightning(audit: Audit, plan: Plan) -> str:
    """Code that defines a class `PlanPrecision` for `Trainer(plugins=[...])`."""
    if plan.strategy == "cast":
        plugin = _PLUGIN.format(base="Precision", device="", arguments="", name=plan.name)
        return comment(_LIGHTNING_NOTE, _CAST_NOTE) + plugin
    setting = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[plan.format]
    arguments = f"{setting!r}, device"
    device = "cuda" if audit.cpu is None else "cpu"
    argument = f', device="{device}"'
    plugin = _PLUGIN.format(base="MixedPrecision", device=argument, arguments=arguments, name=plan.name)
    return comment(_LIGHTNING_NOTE, _AUTOCAST_NOTE.format(setting=setting)) + plugin


GRADSCALER = Tool(
    "GradScaler",
    ("autocast",),
    "A cast plan stores weights in low precision: GradScaler refuses FP16 gradients "
    "('Attempting to unscale FP16 gradients.'), and low-precision weights lose small updates. "
    "Train under an autocast plan.",
    lambda audit, plan: training_code(audit, plan.format, plan.name),
)
LIGHTNING = Tool("Lightning", ("autocast", "cast"), "", _for_lightning)
