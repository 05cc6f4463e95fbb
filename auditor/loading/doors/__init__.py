"""Doors: what libraries store, as targets. Each file builds the model of one kind of folder or file."""

from .build import build, needed_packages, weights_of
from .pipelines import parts_of

__all__ = ["build", "needed_packages", "parts_of", "weights_of"]
