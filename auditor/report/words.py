"""Formats numbers, names and rule texts, and merges repeated blocks, for every reporter."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from ..errors import printable as printable  # re-exported for templates, like `label` below
from ..numerics.formats import label as label
from ..records import Node
from ..records.decisions import Decision
from ..records.paths import pattern
from ..records.training import BackwardNode
from ..resources import resource_dir

T = TypeVar("T")

VERDICTS = ("safe", "sensitive", "unsafe", "untested")
SEVERITIES = ("error", "warning", "info")
LONGEST = 26
"""Maximum characters of block numbers in a path; if they need more, `*` and a count replace them."""

TERMS = (
    "calibration inputs, cast, emulate, error budget, held-out inputs, local error, operation, plan, "
    "predicted, verdict, verified"
).split(", ")
"""Entries of docs/glossary.md that the report repeats."""

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def terms() -> dict[str, str]:
    """{term: its meaning} for TERMS, from the table of glossary.md."""
    text = (resource_dir("docs") / "glossary.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"(?m)^\| (.+?) \| (.+) \|$", text))
    return {term: rows[term] for term in TERMS}


def ratio(value: float | None) -> str:
    """A relative error with two significant digits; Inf, NaN and None in words."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "non-finite"
    if value == 0:
        return "0"
    if 0.000995 <= abs(value) < 99_999.5:  # values that round to 0.0010 and to 99999
        return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:#.2g}".removesuffix(".")
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def or_blank(value: float | None, how: Callable[[float], str] = "{:.3g}".format) -> str:
    """Format a number by `how`; "" for None."""
    return "" if value is None else how(value)


def magnitude(value: float | None) -> str:
    """A magnitude such as max |x| with three significant digits, without zero-padded exponents."""
    if value is None or not math.isfinite(value):
        return "not known" if value is None else "non-finite"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def fold(items: Iterable[T], path: Callable[[T], str], alike: Callable[[T], object] = lambda _: None) -> list[list[T]]:
    """Group items whose module paths differ only in block numbers and whose `alike(item)` is equal; order is kept."""
    groups: dict[tuple[str, object], list[T]] = {}
    for item in items:
        groups.setdefault((pattern(path(item)), alike(item)), []).append(item)
    return list(groups.values())


def fold_paths(paths: Sequence[str]) -> str:
    """Merge paths that differ only in block numbers: `layers.{0-2,7}.mlp` if short and accurate, else `a.*.b.* x6`."""
    if len(paths) == 1:
        return scope(paths[0])
    split = [path.split(".") for path in paths]
    choices = [list(dict.fromkeys(parts)) for parts in zip(*split, strict=True)]  # of each part of the paths
    starred = list[str]()
    listed = list[str]()
    is_short = True
    for part in choices:
        if len(part) == 1:
            starred += part
            listed += part
            continue
        numbers = f"{{{_runs(sorted(map(int, part)))}}}"
        starred.append("*")
        listed.append(numbers)
        is_short = is_short and len(numbers) <= LONGEST
    # Accurate: the paths are all combinations of their parts.
    is_accurate = math.prod(map(len, choices)) == len(paths)
    if is_short and is_accurate:
        return ".".join(listed)
    return f"{scope('.'.join(starred))} x{len(paths)}"


def list_paths(paths: Sequence[str], most: int, noun: str = "module") -> str:
    """About `most` paths, with repeated blocks merged, and the number of omitted paths."""
    groups = fold(paths, str)
    if len(groups) == most + 1 and len(groups[-1]) == 1:
        most += 1
    left = sum(map(len, groups[most:]))
    return ", ".join(map(fold_paths, groups[:most])) + (f" and {count(left, f'more {noun}')}" if left else "")


def shorten(texts: Sequence[str], most: int, file: str = "plan.json") -> tuple[str, ...]:
    """The first texts, and the number of further texts, with the file that contains them."""
    left = len(texts) - most
    return (*texts[:most], *([f"and {left} more, in {file}"] if left > 0 else []))


def _runs(numbers: Sequence[int]) -> str:
    """Compress numbers: `0-2,7` for 0, 1, 2, 7."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])  # number minus position is constant in a run
    texts = list[str]()
    for _, group in groups:
        run = [number for _, number in group]
        if len(run) > 2:
            texts.append(f"{run[0]}-{run[-1]}")
        else:
            texts += map(str, run)
    return ",".join(texts)


def power(base: int, exponent: int) -> str:
    """A power as an axis label: 2, -14 -> `2⁻¹⁴`; exponent zero gives 1."""
    return "1" if exponent == 0 else f"{base}{str(exponent).translate(SUPERSCRIPT)}"


def percent(share: float) -> str:
    """A share as a percentage; `>99%` and `<1%` where rounding would give 100% or 0%."""
    if 0.995 <= share < 1:
        return ">99%"
    if 0 < share < 0.005:
        return "<1%"
    return f"{share:.0%}"


def in_bytes(number: float) -> str:
    """A size in decimal units: 15_000_000 -> `15MB`."""
    return f"{compact(round(number)).replace('B', 'G')}B"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, in singular or plural: `1 operation`, `3,000 operations`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def where(node: Node | BackwardNode | Decision) -> str:
    """An operation as text: ``mul.Tensor in `front` (`a.py:8`)``."""
    lines = ", from ".join(filter(None, (node.source, getattr(node, "called_from", None))))
    return f"{op(node.op)} in `{scope(node.owner)}`{f' (`{lines}`)' if lines else ''}"


def op(name: str) -> str:
    """An ATen name without namespace and default overload: `aten.linear.default` -> `linear`."""
    return name.removeprefix("aten.").removesuffix(".default")


def compact(number: int) -> str:
    """A large count with a unit: 124439808 -> `124M`."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def line(source: str | None, called_from: str | None) -> str:
    """A source line, and the user's call that reached it: `rope.py:10 (from model.py:26 in Attention.forward)`."""
    if source and called_from:
        return f"{source} (from {called_from})"
    return source or called_from or ""


def scope(path: str) -> str:
    """A module path as text; for the root, whose path is empty: `the model's forward`."""
    return path or "the model's forward"


def sentence(text: str) -> str:
    """A message on one line, with a capital and a full stop."""
    line = " ".join(text.split())
    if not line:
        return ""
    stop = "" if line.endswith((".", "!", "?")) else "."
    return f"{line[0].upper()}{line[1:]}{stop}"


def parts(text: str) -> list[tuple[str, bool]]:
    """Split a text into paragraphs, each on one line (False), and code, which is indented by four spaces (True)."""
    result: list[tuple[str, bool]] = []
    for part in filter(str.strip, re.split(r"\n[ \t]*\n", text.strip("\n"))):
        if not all(line.startswith("    ") for line in part.splitlines() if line.strip()):
            result.append((" ".join(part.split()), False))
        elif result and result[-1][1]:
            result[-1] = (f"{result[-1][0]}\n\n{textwrap.dedent(part).rstrip()}", True)
        else:
            result.append((textwrap.dedent(part).rstrip(), True))
    return result


def summary(text: str) -> str:
    """The paragraphs of a rule's text on one line, without code."""
    return " ".join(part.rstrip(":") + "." * part.endswith(":") for part, code in parts(text) if not code)


def remedy(text: str, format: str = "") -> str:
    """The first sentence of advice, on one line. format: a label, such as FP16; a sentence about this format is preferred."""
    paragraph = summary(text.strip().partition("\n\n")[0])
    sentences = re.split(r"(?<=[.!?:])\s+(?=[A-Z])", paragraph)
    about_format = (each for each in sentences if format and each.startswith(f"In {format}, "))
    return next(about_format, sentences[0])
