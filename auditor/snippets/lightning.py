"""Lightning: a precision plugin that patches the model when the Trainer takes it over."""

from __future__ import annotations

from .offer import Chosen
from .tool import Tool, comment

_NOTE = (
    "patched_model.py lies beside plan.json. `part` is the attribute of the LightningModule that was audited; leave it "
    "out if that was the LightningModule itself. Only what runs inside its forward follows the plan.",
)

_AUTOCAST_NOTE = (
    "What training_step does outside of it, the loss for one, runs under Lightning's own autocast, as it does with "
    "precision={setting!r}; FP16 brings its GradScaler along.",
)

_AUTOCAST = """from lightning.pytorch.plugins.precision import MixedPrecision

import patched_model


class PlanPrecision(MixedPrecision):
    def __init__(self, part="", device="cuda"):
        super().__init__({setting!r}, device)
        self.part = part

    def convert_module(self, module):
        patched_model.apply(module.get_submodule(self.part), plan={name!r})
        return module


# trainer = lightning.Trainer(plugins=[PlanPrecision("model")])
"""

_CAST_NOTE = (
    "A cast plan stores weights low and is for trainer.validate, test and predict. It does not train: FP16 and BF16 "
    "weights lose small updates, and Lightning keeps no FP32 copy. Train under an autocast plan.",
)

_CAST = """from lightning.pytorch.plugins.precision import Precision

import patched_model


class PlanPrecision(Precision):
    def __init__(self, part=""):
        super().__init__()
        self.part = part

    def convert_module(self, module):
        patched_model.apply(module.get_submodule(self.part), plan={name!r})
        return module


# trainer = lightning.Trainer(plugins=[PlanPrecision("model")])
"""


def render(chosen: Chosen) -> str:
    """A class `PlanPrecision` for `Trainer(plugins=[...])`."""
    setting = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[chosen.plan.format]
    if chosen.plan.strategy == "autocast":
        notes = (note.format(setting=setting) for note in _AUTOCAST_NOTE)
        return comment(*_NOTE, *notes) + _AUTOCAST.format(setting=setting, name=chosen.plan.name)
    return comment(*_NOTE, *_CAST_NOTE) + _CAST.format(name=chosen.plan.name)


TOOL = Tool(title="Lightning", strategies=("autocast", "cast"), otherwise="", render=render)
