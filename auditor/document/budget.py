"""What the files say of the error that was allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..records.written import Written


@dataclass(frozen=True)
class Budget:
    """What the outputs may be off by."""

    max_error: Annotated[
        float, Written("the error that the budget allows", finite=True, exact=True, schema={"exclusiveMinimum": 0})
    ]
    metric: Annotated[str, Written("what it is measured in")]
    criteria: Annotated[
        tuple[str, ...],
        Written(
            "criteria that were set, and the budget of the outputs that none speaks of; `max_error` is 1 then, and errors are "
            "the largest share of what they allow",
            sparse=True,
        ),
    ] = ()
