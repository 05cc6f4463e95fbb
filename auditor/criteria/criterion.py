"""One criterion: an output, what is measured of it, the limit that this must keep to, and what FP32 does by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from .kinds import FUNCTION, KINDS, Kind, Options

FLOOR = 3.0
"""How many times what runs in FP32 differ by an error has to be, to be called one."""


def floor_of(error: float, joint: float) -> float:
    """Up to what nothing is called an error, where runs in FP32 differ by that much.

    error: by what the budget measures; joint: relative L2 of all outputs. 0 where the outputs of runs have so little in
    common that everything would pass.
    """
    return FLOOR * error if FLOOR * joint < 1 and math.isfinite(error) else 0.0


Function = Callable[[Any, Any], Any]
"""(reference, candidate) -> a number that is 0 where nothing differs."""


def name_of(function: Function) -> str:
    """What a function is called in words."""
    return str(getattr(function, "__name__", type(function).__name__))


def strict(written: str) -> bool:
    """Whether a criterion, as it is written, allows nothing at all to be lost."""
    return written.endswith(" <= 0") or (written.endswith(" >= 1") and ": psnr" not in written)


@dataclass(frozen=True)
class Criterion:
    """output: a name as in the model's own return; a name of something that holds several outputs, or a pattern with `*`,
    speaks of each of them, and the worst one counts. kind: a name of KINDS, or what `function` is called."""

    output: str
    kind: str
    limit: float
    options: Options = ()
    function: Function | None = None

    @property
    def how(self) -> Kind:
        """The kind's row."""
        return FUNCTION if self.function is not None else KINDS[self.kind]

    @property
    def measured(self) -> str:
        """The kind with what is said of it: `topk(5)`."""
        said = [f"{v}" if n in ("k", "form", "over", "threshold", "peak") else f"{n}={v}" for n, v in self.options]
        return f"{self.kind}({', '.join(said)})" if said else self.kind

    def option(self, name: str, default: Any) -> Any:
        """What is said in brackets under a name."""
        return dict(self.options).get(name, default)

    def speaks_of(self, name: str) -> bool:
        """Whether an output of this name is meant."""
        wanted = self.output
        return name == wanted or name.startswith(f"{wanted}.") or ("*" in wanted and fnmatchcase(name, wanted))

    def holds(self, value: float) -> bool:
        """Whether a value keeps to the limit."""
        return self.how.holds(value, self.limit)

    def share(self, value: float) -> float:
        """How much of what the limit allows a value takes, see Kind.share."""
        return self.how.share(value, self.limit)

    def __str__(self) -> str:
        return f"{self.output}: {self.measured} {self.how.sign} {self.limit:.12g}"
