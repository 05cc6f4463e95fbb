"""Verify: the emitted artefact, imported in a fresh process and run as its user runs it."""

from .artefact import NotHandedOver, Verifier
from .lifetime import unwound
from .running import Answers, Outputs, answers_of, failure_of, run_patched

__all__ = [
    "Answers",
    "NotHandedOver",
    "Outputs",
    "Verifier",
    "answers_of",
    "failure_of",
    "run_patched",
    "unwound",
]
