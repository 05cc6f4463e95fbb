"""Rehearsal: runs the user's training step, by default 200 times, on a CPU, in FP32 and in every recipe."""
