"""Builds a Subject from the user's TARGET or a live model, and runs the model in FP32."""

from .subject import cautions, from_object, load

__all__ = ["cautions", "from_object", "load"]
