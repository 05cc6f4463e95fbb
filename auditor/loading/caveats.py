"""What a reader of an audit has to know about its subject, in words."""

from __future__ import annotations

from ..records import Subject

RANDOM_WEIGHTS = "weights are RANDOM: nothing loaded a checkpoint; ranges and errors say little (pass --weights)"
SYNTHETIC_INPUTS = (
    "inputs are made up: ranges and errors may differ on real data (define get_inputs() or pass --inputs)"
)


def cautions(subject: Subject) -> tuple[str, ...]:
    """The subject's warnings, and a sentence for weights and for inputs that are nobody's."""
    random = (RANDOM_WEIGHTS,) if subject.random_weights else ()
    synthetic = (SYNTHETIC_INPUTS,) if subject.synthetic_inputs else ()
    return (*subject.warnings, *random, *synthetic)
