"""Training: what a step of gradient descent meets in FP16 and BF16."""

from __future__ import annotations
