"""Verify: the emitted artefact, imported in a fresh process and run as its user runs it."""

from .artefact import TIMEOUT, NotHandedOver, Verifier
from .lifetime import unwound
from .offloading import OFFLOADED, answers_under
from .running import Answers, Outputs, answers_of, failure_of, run_patched, said_no_memory, says_nothing
from .scores import FP32, score_here
from .standing import Standing
from .timing import TODAY, timed

__all__ = [
    "FP32",
    "OFFLOADED",
    "TIMEOUT",
    "TODAY",
    "Answers",
    "NotHandedOver",
    "Outputs",
    "Standing",
    "Verifier",
    "answers_of",
    "answers_under",
    "failure_of",
    "run_patched",
    "said_no_memory",
    "says_nothing",
    "score_here",
    "timed",
    "unwound",
]
