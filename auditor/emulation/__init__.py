"""Emulates CUDA on a CPU for the code in a `with` block: the public `auditor.emulate`."""
