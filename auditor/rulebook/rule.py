"""The structure of a rule file as pydantic models, and message templates, whose fields are facts."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, Strict
from pydantic_core import PydanticCustomError

from ..numerics.formats import label, narrower
from .conditions import ALWAYS, Condition, all_of, refusal
from .facts import FACTS, address_problem, named_formats

FORMATS = "formats"
"""Field of a message template for the formats of a finding."""


def facts_shown(message: str, formats: Collection[str]) -> list[str]:
    """Addresses of the facts in a message, in order. Raises: ValueError for an invalid template."""
    fields = list(string.Formatter().parse(message))
    for spec in (spec for _, _, spec, _ in fields if spec):
        if "{" in spec:
            raise ValueError(f"the format specifier {spec!r} contains another field, which is not allowed")
        if re.search(r"\d{3}", spec):
            raise ValueError(f"the format specifier {spec!r} makes a field 100 or more characters wide")
    names = [name for _, name, _, _ in fields if name not in (None, FORMATS)]
    return [
        address
        for name in names
        for address in ([f"{name}.{fmt}" for fmt in formats] if name in FACTS and FACTS[name].by_format else [name])
    ]


def fill_message(message: str, facts: Mapping[str, Any], formats: Collection[str]) -> str:
    """Insert facts into a message; an unknown fact reads "unknown". formats: the text for `{formats}`."""
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
    """A fact that depends on the format: `fact.fp16`, or for all formats `0.5 in FP16 and 4 in BF16`."""

    def __init__(self, values: Mapping[str, Any], formats: Collection[str]) -> None:
        self._values, self._formats = values, formats

    def __getattr__(self, fmt: str) -> Any:
        return _field_value(self._values.get(fmt))

    def __format__(self, spec: str) -> str:
        return " and ".join(f"{getattr(self, fmt):{spec}} in {label(fmt)}" for fmt in self._formats)


def without(formats: Collection[str], text: str) -> str:
    """The sentences of a text that mention none of the formats."""
    mention = _mention_of(frozenset(formats))
    sentences = re.split(r"(?<=\.)\s+", text)
    return " ".join(line for line in sentences if not mention.search(line))


@cache
def _mention_of(formats: frozenset[str]) -> re.Pattern[str]:
    """Matches the label of any of the formats, as a word."""
    labels = "|".join(re.escape(label(name)) for name in sorted(formats))
    return re.compile(rf"\b(?:{labels})\b" if labels else NEVER)


NEVER = r"(?!)"
"""A pattern that matches nothing."""

_OF_GPUS = re.compile(r"\b(CUDA|GPUs?|cuFFT|cuDNN|cuBLAS)\b")


def for_cpu(rule: Rule) -> Rule:
    """The rule in audits for a CPU: with its texts for them, and without sentences that are only true of GPUs."""
    sentences = re.split(r"(?<=\.)\s+", rule.why)
    why = " ".join(sentence for sentence in sentences if not _OF_GPUS.search(sentence))
    return replace(rule, message=rule.on_cpu.message or rule.message, why=rule.on_cpu.why or why or rule.why)


SEVERITIES = ("info", "warning", "error")
CONFIDENCES = ("low", "medium", "high")
_SAMPLES: Mapping[str, Any] = {"text": "x", "flag": True, "number": 1.0, "texts": ("x",), "numbers": (1.0,)}


def _require_text(text: str) -> str:
    if not text.strip():
        raise refusal("must not be empty", slug="rule-bad-value")
    return text.strip("\n")


def _format(name: str) -> str:
    if name not in named_formats():
        raise refusal(f"{name!r} is not one of {', '.join(named_formats())}")
    return name


def _template(message: str) -> str:
    """Check that a message is a valid template over existing facts."""
    try:
        for address in facts_shown(message, narrower()):
            if problem := address_problem(address):
                raise refusal(problem)
        samples = {name: _SAMPLES[fact.type] for name, fact in FACTS.items()}
        samples |= {
            name: dict.fromkeys(named_formats(), samples[name]) for name, fact in FACTS.items() if fact.by_format
        }
        fill_message(message, samples, narrower())
    except PydanticCustomError:
        raise
    except (ValueError, TypeError, LookupError) as error:
        raise refusal(f"is not a valid template: {error}") from error
    return message.strip()


def _pattern(text: str) -> str:
    """Check that a text with holes is a Python expression."""
    try:
        operations_in(text)
    except SyntaxError as error:
        raise refusal(f"is not a Python expression with holes: {error.msg}") from error
    return text


def operations_in(template: str) -> int:
    """Number of calls and operators in an expression with holes such as `{x}` and `{*how}`; conversions do not count."""
    text = re.sub(r"\{(\*?)(\w+)(:\w+)?\}", r"\1\2", template)
    nodes = [node for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Call | ast.BinOp)]
    names = [ast.unparse(node.func) if isinstance(node, ast.Call) else "" for node in nodes]
    return sum(not name.endswith((".float", ".to")) for name in names)


Text = Annotated[str, Strict(), AfterValidator(_require_text)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
Patterns = Annotated[tuple[Annotated[Text, AfterValidator(_pattern)], ...], Field(min_length=1)]
When = Annotated[Condition, PlainValidator(all_of)]


class _Table:
    """A table of a rule file, which allows no other keys."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class ChainNode(_Table):
    """One node of a chain: any of `ops` (exact, packet or glob) that satisfies `when`."""

    ops: Texts
    when: When = ALWAYS


@dataclass(frozen=True)
class Chain(_Table):
    """A chain of operations to match, ignoring reshapes and casts. report: the node that a finding names.

    paths: `a > b? > c`, with nodes by name; a `?` marks an optional node.
    """

    paths: Texts
    report: Text

    @property
    def steps(self) -> list[list[str]]:
        """The node names along each path, with `?` after optional ones."""
        return [[name.strip() for name in path.split(">")] for path in self.paths]


@dataclass(frozen=True)
class Match(_Table):
    """The operations that a rule examines; all given fields must match. chains: one of several must match."""

    ops: Texts = ("*",)
    nodes: Mapping[str, ChainNode] = field(default_factory=dict)
    chains: Annotated[tuple[Chain, ...], Field(alias="chain")] = ()


@dataclass(frozen=True)
class Example(_Table):
    """Code in which a rule finds a problem, and the repaired code ("" if nothing can be repaired).

    code, fixed: Python that defines `forward(...)`, or a module called `model`; torch, nn and F are imported. inputs:
    one Python expression for each tensor argument. changes: how the repaired code's FP32 results differ, "" if only by
    rounding.
    """

    code: Text
    fixed: Text = ""
    inputs: Texts = ()
    changes: Text = ""


@dataclass(frozen=True)
class RuleFix(_Table):
    """A rewriting of the source that `fix` tries where the rule finds a problem, see docs/fix.md.

    match: expressions with holes, such as `torch.log({x})`. replace: what stands there instead, the best first.
    safety: `unsafe` if only rounding changes; `display` if results change, so that it is shown and never applied.
    """

    match: Patterns
    replace: Patterns
    safety: Literal["safe", "unsafe", "display"] = "unsafe"

    @property
    def joins(self) -> bool:
        """Whether one operation replaces several, so that their intermediate results are not stored."""
        return operations_in(self.replace[0]) == 1 < min(map(operations_in, self.match))


@dataclass(frozen=True)
class OtherAdvice(_Table):
    """A remedy that replaces the rule's `advice` for operations that satisfy `when`."""

    when: When
    advice: Text


@dataclass(frozen=True)
class OnCpu(_Table):
    """Texts that replace a rule's own in audits for a CPU; "" leaves the rule's own, without sentences about GPUs."""

    message: Annotated[str, AfterValidator(_template)] = ""
    why: str = ""


@dataclass(frozen=True)
class Rule(_Table):
    """A pattern of operations that often fails in a format, with texts for its findings.

    upcast: whether the rule also applies to values that the user's code converts to FP32; if not, loading adds a
    condition to `when`. supersedes: codes of more general rules, which are dropped if this rule fires; its finding gets
    the highest severity of all. measurable: whether running one operation in low precision can confirm the rule.
    other_advice: remedies for some of the operations; the first whose condition holds is shown. fixes: rewritings of the
    source. on_cpu: texts of audits for a CPU.
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
    other_advice: tuple[OtherAdvice, ...] = ()
    fixes: Annotated[tuple[RuleFix, ...], Field(alias="fix")] = ()
    on_cpu: OnCpu = OnCpu()

    @property
    def code(self) -> str:
        """Three letters, the same for the whole family, and three digits: the file name before the first `-`."""
        return self.path.stem.partition("-")[0]

    @property
    def name(self) -> str:
        """The problem in words: the file name after the code."""
        return self.path.stem.partition("-")[2]

    @property
    def family(self) -> str:
        """Name of the directory that contains the rule's file."""
        return self.path.parent.name
