"""Limits of a training step in low precision, in audits and in rehearsals: of gradient errors, and of loss scales."""

from __future__ import annotations

TOLERATED, MOST_TOLERATED = 0.1, 0.25
"""Largest relative gradient error of a recommended format: the gradient then points within 6 degrees of FP32's. Where
gradients of two batches differ far more, up to the second value: within 15 degrees."""

NOISE_SHARE = 0.25
"""A gradient error of up to this share of the difference between batches is tolerated."""

HEADROOM = 16.0
"""Factor from the initial to the largest usable loss scale, since gradients may grow; less if few scales are usable."""


def tolerated_error(noise: float | None) -> float:
    """Largest tolerated relative L2 error of gradients, in an audit and in a rehearsal. noise: the relative difference of
    FP32 gradients between two batches; None if unknown."""
    return min(max(TOLERATED, NOISE_SHARE * (noise or 0.0)), MOST_TOLERATED)
