"""Verification: runs `patched_model.py` or an exported program in a fresh process, as a user's script would."""

from .artefact import LATER, TIMEOUT, NotHandedOver, Verifier
from .loaders import ONNX, PROGRAM, in_hand, load_program
from .running import FP32, TODAY, Answers, Question, Runs, failure_of, run_patched, said_no_memory, says_nothing

__all__ = [
    "FP32",
    "LATER",
    "ONNX",
    "PROGRAM",
    "TIMEOUT",
    "TODAY",
    "Answers",
    "NotHandedOver",
    "Question",
    "Runs",
    "Verifier",
    "failure_of",
    "in_hand",
    "load_program",
    "run_patched",
    "said_no_memory",
    "says_nothing",
]
