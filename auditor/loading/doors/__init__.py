"""Builds models from what libraries store, one file for each kind of folder or file (a "door")."""

from .build import build, needed_packages, weights_of
from .pipelines import parts_of

__all__ = ["build", "needed_packages", "parts_of", "weights_of"]
