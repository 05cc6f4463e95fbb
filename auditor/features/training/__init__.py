"""Audits a training step: the backward pass of each operation, usable loss scales, and the format to train in."""
