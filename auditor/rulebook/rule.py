"""What a rule file says: records of its shape, which pydantic fills from it, and messages, whose fields are facts."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, Strict
from pydantic_core import PydanticCustomError

from ..numerics.formats import label, narrower
from .conditions import ALWAYS, Condition, all_of, refusal
from .facts import EACH, FACTS, Fact, address_problem

FORMATS = "formats"
"""A field of its own: the formats that a finding speaks of."""


def facts_shown(message: str, formats: Collection[str]) -> list[str]:
    """Addresses of the facts that a message shows, in the order written. Raises: ValueError for what is no template."""
    fields = list(string.Formatter().parse(message))
    for spec in (spec for _, _, spec, _ in fields if spec):
        if "{" in spec:
            raise ValueError(f"the format {spec!r} of a field holds another field, which is not allowed")
        if re.search(r"\d{3}", spec):
            raise ValueError(f"{spec!r} makes a field a hundred characters or more wide")
    names = [name for _, name, _, _ in fields if name not in (None, FORMATS)]
    return [
        address
        for name in names
        for address in ([f"{name}.{fmt}" for fmt in formats] if name in FACTS and FACTS[name].by_format else [name])
    ]


def fill_message(message: str, facts: Mapping[str, Any], formats: Collection[str]) -> str:
    """The message with the facts; one that is not known reads "unknown". formats: those it speaks of: `{formats}`."""
    shown = {name: _field_value(value, formats) for name, value in facts.items()}
    return message.format_map({**shown, FORMATS: " and ".join(map(label, formats))})


def _field_value(value: Any, formats: Collection[str] = ()) -> Any:
    if isinstance(value, Mapping):
        return _ByFormat(value, formats)
    return _Unknown() if value is None else value


class _Unknown:
    def __format__(self, spec: str) -> str:
        return "unknown"


class _ByFormat:
    """A fact that is kept by format: of one as `fact.fp16`, of all that are spoken of `0.5 in FP16 and 4 in BF16`."""

    def __init__(self, values: Mapping[str, Any], formats: Collection[str]) -> None:
        self._values, self._formats = values, formats

    def __getattr__(self, fmt: str) -> Any:
        return _field_value(self._values.get(fmt))

    def __format__(self, spec: str) -> str:
        return " and ".join(f"{getattr(self, fmt):{spec}} in {label(fmt)}" for fmt in self._formats)


def without(formats: Collection[str], text: str) -> str:
    """The sentences of a text that name none of the formats."""
    labels = [re.compile(rf"\b{re.escape(label(name))}\b") for name in formats]
    sentences = re.split(r"(?<=\.)\s+", text)
    return " ".join(line for line in sentences if not any(name.search(line) for name in labels))


SEVERITIES = ("info", "warning", "error")
CONFIDENCES = ("low", "medium", "high")
_SAMPLES: Mapping[str, Any] = {"text": "x", "flag": True, "number": 1.0, "texts": ("x",), "numbers": (1.0,)}


def _require_text(text: str) -> str:
    if not text.strip():
        raise refusal("must not be empty", slug="rule-bad-value")
    return text.strip("\n")


def _format(name: str) -> str:
    if name not in (*narrower(), EACH):
        raise refusal(f"{name!r} is not one of {', '.join((*narrower(), EACH))}")
    return name


def _template(message: str) -> str:
    """The message, once it is known to be a template over facts that there are."""
    try:
        for address in facts_shown(message, narrower()):
            if problem := address_problem(address):
                raise refusal(problem)
        fill_message(message, {name: _sample(fact) for name, fact in FACTS.items()}, narrower())
    except PydanticCustomError:
        raise
    except (ValueError, TypeError, LookupError) as error:
        raise refusal(f"is no valid template: {error}") from error
    return message.strip()


def _sample(fact: Fact) -> Any:
    sample = _SAMPLES[fact.type]
    return dict.fromkeys((*narrower(), EACH), sample) if fact.by_format else sample


Text = Annotated[str, Strict(), AfterValidator(_require_text)]
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
    def steps(self) -> list[list[str]]:
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
