"""Verify: the emitted artefact, imported in a fresh process and run for real."""

from .artefact import verify_emitted
from .running import run_patched

__all__ = ["run_patched", "verify_emitted"]
