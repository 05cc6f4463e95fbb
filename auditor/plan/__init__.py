"""Chooses plans from measurements and costs, runs the patched models, compares them with FP32, and explains plans."""
