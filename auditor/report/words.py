"""How numbers, names and verdicts read, shared by every reporter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..artefact.strategies import strategy_of
from ..numerics.formats import label as label  # one word of those that reporters and templates share
from ..records import Memory, Plan

VERDICTS = ("safe", "sensitive", "unsafe", "untested")
SEVERITIES = ("error", "warning", "info")
LONGEST_BRACED = 24
"""Characters of block numbers beyond which how many they are says more."""

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plan_title(plan: Plan) -> str:
    """A plan as people speak of it: `FP16 under autocast`."""
    return f"{label(plan.format)} {strategy_of(plan.strategy).title}"


def ratio(value: float | None) -> str:
    """A relative error in two significant digits; overflow and absence in words."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "non-finite"
    if value == 0:
        return "0"
    if abs(value) >= 0.000995:  # what rounds to 0.0010
        if abs(value) >= 99_999.5:
            return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
        return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:#.2g}".removesuffix(".")
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def magnitude(value: float | None) -> str:
    """A size such as max |x| in three significant digits, without zero-padded exponents."""
    if value is None or not math.isfinite(value):
        return "not known" if value is None else "non-finite"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def braced(paths: Sequence[str]) -> str:
    """Module paths that differ in block numbers as one: `layers.{0-2,7}.mlp`, or `a.*.b.* x6` where it would be too long."""
    split = [path.split(".") for path in paths]
    alike = len({len(steps) for steps in split}) == 1
    folded = _folded(split)
    if alike and len(folded) == 1:
        named = [_choice(steps) for steps in folded[0]]
        if all(
            len(text) <= LONGEST_BRACED + len("{}")
            for text, steps in zip(named, folded[0], strict=True)
            if len(steps) > 1
        ):
            return ".".join(named)
    varying = {i for i, steps in enumerate(zip(*split, strict=False)) if len(set(steps)) > 1}
    return f"{'.'.join('*' if i in varying else step for i, step in enumerate(split[0]))} x{len(paths)}"


def each(paths: Sequence[str]) -> str:
    """The same in full: `layers.0.{k,v}, layers.{1-3}.v`."""
    return ", ".join(".".join(map(_choice, steps)) for steps in _folded([path.split(".") for path in paths]))


def _folded(split: Sequence[Sequence[str]]) -> list[list[tuple[str, ...]]]:
    """Paths as products of what stands at each step, in which each path is once; those that come first, first."""
    found: list[list[tuple[str, ...]]] = [[(step,) for step in steps] for steps in dict.fromkeys(map(tuple, split))]
    for i in reversed(range(max(map(len, split), default=0))):
        groups: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
        for steps in found:
            if i >= len(steps):
                groups[tuple(steps)] = steps
                continue
            rest = (*steps[:i], None, *steps[i + 1 :])
            group = groups.setdefault(rest, [*steps[:i], (), *steps[i + 1 :]])
            group[i] = (*group[i], *steps[i])
        found = list(groups.values())
    return found


def _choice(steps: Sequence[str]) -> str:
    """One step of a path, or all of several: `{0-2,7}`."""
    if len(steps) == 1:
        return steps[0]
    plain = all(step.isdecimal() and len(step) < 10 for step in steps)
    return f"{{{_runs(sorted(map(int, steps))) if plain else ','.join(steps)}}}"


def _runs(numbers: Sequence[int]) -> str:
    """`0-2,7` for 0, 1, 2, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def power(base: int, exponent: int) -> str:
    """A power for an axis: 2, -14 -> `2⁻¹⁴`; the zeroth is 1."""
    return "1" if exponent == 0 else f"{base}{str(exponent).translate(SUPERSCRIPT)}"


def percent(share: float) -> str:
    """A share as a percentage that says 100% only when it is all of it."""
    if 0.995 <= share < 1:
        return ">99%"
    if 0 < share < 0.005:
        return "<1%"
    return f"{share:.0%}"


def memory(found: Memory) -> str:
    """Weights and activations together: `15MB`."""
    return f"{compact(found.weights + found.activations)}B"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 operation`, `3,000 operations`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def op(name: str) -> str:
    """An ATen name without what every one has: `aten.linear.default` -> `linear`."""
    return name.removeprefix("aten.").removesuffix(".default")


def compact(number: int) -> str:
    """A large count with a unit: 124439808 -> `124M`."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def line(source: str | None, called_from: str | None) -> str:
    """The line that wrote an operation, and the call that led there: `rope.py:10 (from model.py:26 in Attention.forward)`."""
    if source and called_from:
        return f"{source} (from {called_from})"
    return source or called_from or ""


def scope(path: str) -> str:
    """A module path, the root named in words."""
    return path or "(whole model)"


def printable(text: str) -> str:
    """Text with everything that could drive a terminal, break a line or reorder letters written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
