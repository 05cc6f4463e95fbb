"""The user's own score of the model: in FP32, and under every verified plan."""
