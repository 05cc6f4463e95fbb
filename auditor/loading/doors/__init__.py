"""Doors: what libraries store, as targets. Each file builds the model of one kind of folder or file."""

from .build import build, needed_packages

__all__ = ["build", "needed_packages"]
