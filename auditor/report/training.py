"""How to train, in words: for the verdict of an audit in mode training, and for its section."""

from __future__ import annotations

from ..numerics.formats import FORMATS
from ..records.audit import Audit
from ..records.training import Training
from .words import label, sentence


def training_plan(audit: Audit) -> str | None:
    """The plan to train under: the audit's verified autocast plan in the recommended training format, or None."""
    training = audit.training
    plan = audit.plans.get(f"autocast_{training.format}") if training else None
    return plan.name if plan is not None and plan.is_verified else None


def training_words(training: Training) -> str:
    """A sentence on the format to train in and the reason, or on why no format is recommended."""
    if training.format is None:
        return sentence(training.recommendation)
    return sentence(f"Train in {training.recommendation}")


def training_headline(audit: Audit) -> str | None:
    """How to train, in one sentence; None for an audit in mode inference."""
    training = audit.training
    if training is None:
        return None
    if training.format is None:
        return "" if audit.recommended is None else training_words(training)
    plan = training_plan(audit)
    under = "under that plan" if plan is not None and plan == audit.recommended else "under autocast"
    if FORMATS[training.format].loss_scaling and training.fp16 is not None and training.fp16.init is not None:
        return f"Train in {label(training.format)} {under}, with an initial loss scale of {training.fp16.init:,.10g}."
    return f"Train in {label(training.format)} {under}, without a loss scale."
