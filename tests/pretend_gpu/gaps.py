"""Operations that CUDA has no half kernels for and the CPU has: those of PyTorch's OpInfo (`dtypesIfCUDA`) that the pipeline's models use."""

from __future__ import annotations

MISSING = frozenset({"igamma", "igammac", "angle", "histc", "_cdist_forward", "_ctc_loss", "cdist", "geqrf"})


def lacks_half(packet: str) -> bool:
    """Whether CUDA refuses half-precision tensors."""
    return packet in MISSING
