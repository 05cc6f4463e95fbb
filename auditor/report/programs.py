"""Plans that are programs of their own, each in one line."""

from __future__ import annotations

from ..records import Program
from .words import count


def program_line(program: Program) -> str:
    """What there is to say of a program: its file, how much of it is low, and which batches it takes."""
    low = f"{program.low:,} of {count(program.operations, 'operation')} low, {count(program.casts, 'conversion')}"
    batch = "any batch size" if program.fixed is None else f"the audited batch size alone: {program.fixed}"
    return f"{program.file}: {low}, {batch}"
