"""Verify: the emitted artefact, imported in a fresh process and run as its user runs it."""

from ..processes import unwound
from .artefact import TIMEOUT, NotHandedOver, Verifier
from .failures import failure_of, said_no_memory, says_nothing
from .loaders import ONNX, PROGRAM, in_hand, saved
from .running import FP32, TODAY, Answers, Runs, counted, run_patched

__all__ = [
    "FP32",
    "ONNX",
    "PROGRAM",
    "TIMEOUT",
    "TODAY",
    "Answers",
    "NotHandedOver",
    "Runs",
    "Verifier",
    "counted",
    "failure_of",
    "in_hand",
    "run_patched",
    "said_no_memory",
    "saved",
    "says_nothing",
    "unwound",
]
