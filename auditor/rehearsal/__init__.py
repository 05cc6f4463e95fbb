"""Rehearsal: runs the user's training step some hundred times on a CPU, in FP32 and every recipe."""
