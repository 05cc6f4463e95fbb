"""A GPU's first half hour as one command, `python -m benchmarks.gpu`: what the CPU emulates, held against what the GPU does."""
