"""Verify: the emitted artefact, imported in a fresh process and run as its user runs it."""

from .artefact import TIMEOUT, NotHandedOver, Verifier
from .loaders import ONNX, PROGRAM, in_hand, load_program
from .running import FP32, TODAY, Answers, Runs, failure_of, progress_text, run_patched, said_no_memory, says_nothing

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
    "failure_of",
    "in_hand",
    "load_program",
    "progress_text",
    "run_patched",
    "said_no_memory",
    "says_nothing",
]
