"""What a rule file says: records of its shape, which pydantic fills from it, and messages, whose fields are facts."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, Strict
from pydantic_core import PydanticCustomError

from ..numerics.formats import label, narrower
from .conditions import ALWAYS, Condition, all_of, refusal
from .facts import EACH, FACTS, address_problem, fact_at

FORMATS = "formats"
"""A field of its own: the formats that a finding speaks of."""


def facts_shown(message: str) -> list[str]:
    """Addresses of the facts that a message shows, in the order written. Raises: ValueError for what is no template."""
    return [name for _, name, _, _ in string.Formatter().parse(message) if name is not None]


def fill_message(message: str, value: Callable[[str], Any], formats: Collection[str]) -> str:
    """The message with `value(address)` in the place of each fact; one that is not known reads "unknown".

    formats: those it speaks of, which `{formats}` names.
    """
    named = " and ".join(label(name) for name in formats)
    return _Filler(lambda name: named if name == FORMATS else value(name)).vformat(message, (), {})


class ByFormat(dict[str, Any]):
    """A fact that is kept by format, all of it: `0.5 in FP16 and 4 in BF16`."""

    def __format__(self, spec: str) -> str:
        return " and ".join(f"{_format_value(value, spec)} in {label(name)}" for name, value in self.items())


def _format_value(value: Any, spec: str) -> str:
    return "unknown" if value is None else format(value, spec)


def without(formats: Collection[str], text: str) -> str:
    """The sentences of a text that name none of the formats."""
    labels = [re.compile(rf"\b{re.escape(label(name))}\b") for name in formats]
    sentences = re.split(r"(?<=\.)\s+", text)
    return " ".join(line for line in sentences if not any(name.search(line) for name in labels))


class _Filler(string.Formatter):
    """str.format in which a field is the address of a fact, dots included."""

    def __init__(self, value: Callable[[str], Any]) -> None:
        self._value = value

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return self._value(field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{3}", format_spec):
            raise ValueError(f"{format_spec!r} asks for a hundred characters or more")
        return _format_value(value, format_spec)


SEVERITIES = ("info", "warning", "error")
CONFIDENCES = ("low", "medium", "high")
_SAMPLES: Mapping[str, Any] = {"text": "x", "flag": True, "number": 1.0, "texts": ("x",), "numbers": (1.0,)}


def _filled(text: str) -> str:
    if not text.strip():
        raise refusal("must not be empty")
    return text.strip("\n")


def _format(name: str) -> str:
    if name not in (*narrower(), EACH):
        raise refusal(f"{name!r} is not one of {', '.join((*narrower(), EACH))}")
    return name


def _template(message: str) -> str:
    """The message, once it is known to be a template over facts that there are."""
    try:
        for name in facts_shown(message):
            problem = None if name == FORMATS or _in_all_formats(name) else address_problem(name)
            if problem:
                raise refusal(problem)
        fill_message(message, _sample, narrower())
    except PydanticCustomError:
        raise
    except (ValueError, TypeError, IndexError) as error:
        raise refusal(f"is no valid template: {error}") from error
    return message.strip()


def _in_all_formats(name: str) -> bool:
    return name in FACTS and FACTS[name].by_format


def _sample(name: str) -> Any:
    sample = _SAMPLES[fact_at(name).type]
    return ByFormat(fp16=sample, bf16=sample) if _in_all_formats(name) else sample


Text = Annotated[str, Strict(), AfterValidator(_filled)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
When = Annotated[Condition, PlainValidator(all_of)]


class _Table:
    """A table of a rule file, in which no other keys stand."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class ChainNode(_Table):
    """One node of a chain: any of `ops` (exact, packet or glob), for which `when` holds."""

    ops: Texts
    when: When = ALWAYS


@dataclass(frozen=True)
class Chain(_Table):
    """A small graph of ops, looked for with reshapes and casts left out. report: the node a finding names.

    paths: `a > b? > c`, of nodes by name; one that ends in `?` may be missing.
    """

    paths: Texts
    report: Text

    @property
    def drawn(self) -> list[list[str]]:
        """The names along each path, a `?` behind those that may be missing."""
        return [[name.strip() for name in path.split(">")] for path in self.paths]


@dataclass(frozen=True)
class Match(_Table):
    """Where a rule looks; both must hold. chains: alternatives, one of which must be found, of these nodes."""

    ops: Texts = ("*",)
    nodes: Mapping[str, ChainNode] = field(default_factory=dict)
    chains: Annotated[tuple[Chain, ...], Field(alias="chain")] = ()


@dataclass(frozen=True)
class Example(_Table):
    """Code on which a rule fires, and the same code repaired ("" where there is nothing to repair).

    code, fixed: Python that defines `forward(...)`, or a module called `model`, with torch, nn and F at hand. inputs:
    one Python expression for each tensor that it is called with. changes: in what the repaired code differs from the
    other where both run in FP32, "" where in nothing but rounding.
    """

    code: Text
    fixed: Text = ""
    inputs: Texts = ()
    changes: Text = ""


@dataclass(frozen=True)
class Rule(_Table):
    """One way for a model to be hurt by a format.

    upcast: whether it also speaks of operations on values that the author raised to FP32; `when` says so by the time it is a
    Rule. supersedes: codes of more general rules, which say nothing where this one fires; it then speaks with the highest
    severity and confidence among them. measurable: whether running one operation low can bear the rule out.
    """

    match: Match
    message: Annotated[Text, AfterValidator(_template)]
    why: Text
    advice: Text
    references: Texts
    path: Path
    severity: Literal["info", "warning", "error"] = "warning"
    confidence: Literal["low", "medium", "high"] = "medium"
    formats: Annotated[tuple[Annotated[Text, AfterValidator(_format)], ...], Field(min_length=1)] = ("fp16", "bf16")
    when: When = ALWAYS
    upcast: Annotated[bool, Strict()] = False
    example: Example | None = None
    supersedes: Texts = ()
    measurable: Annotated[bool, Strict()] = True

    @property
    def code(self) -> str:
        """Three letters, the same for the whole family, and three digits: what its file is called before the first `-`."""
        return self.path.stem.partition("-")[0]

    @property
    def name(self) -> str:
        """The bad thing: what the file is called behind that."""
        return self.path.stem.partition("-")[2]

    @property
    def family(self) -> str:
        """The directory that its file lies in."""
        return self.path.parent.name
