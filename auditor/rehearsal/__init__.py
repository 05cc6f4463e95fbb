"""Rehearsal: runs the user's training step a few hundred times in FP32 and in every recipe, emulating a GPU on a CPU."""
