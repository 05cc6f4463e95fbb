"""What an output is held to by default, or could be held to, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import Written


@dataclass(frozen=True)
class Proposal:
    """A criterion that nobody set."""

    output: Annotated[str, Written("the output, by its name in what the model returns")]
    criterion: Annotated[str, Written("as `--criterion` takes it; the limit is a suggestion")]
    because: Annotated[str, Written("what speaks for it, in words")]
    holds: Annotated[
        bool,
        Written(
            "`true`: plans are held to it by default, and `--criterion` sets another limit; `false`: it is proposed"
        ),
    ] = False
