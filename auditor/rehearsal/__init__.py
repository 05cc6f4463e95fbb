"""Rehearsal: the user's own training step, run for some hundred steps in each recipe beside FP32, before a GPU is paid for."""
