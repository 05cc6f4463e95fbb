"""Measured time and memory of the model in FP32 and under every plan."""
