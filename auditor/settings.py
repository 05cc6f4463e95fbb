"""What an audit can be asked, each option once: its name, type, default and help.

The command line, `auditor.audit()`, `[tool.auditor]`, a fleet's TOML and the tables of the docs are made of this.
Importing this needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    StrictBool,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from .artefact.strategies import GRAPHS, SHIPPED, known
from .config import Ignore, Selection
from .criteria import Criterion
from .devices import check_device, chosen, followed, has_clock, is_native, name_of, row_of
from .errors import AuditorError
from .numerics.formats import DEFAULT, auditable, runs
from .records.run import DIRECTIONS
from .resources import table

if TYPE_CHECKING:
    from .rulebook.rule import Rule
    from .score import Scoring
else:  # what pydantic would have to import
    Rule = Scoring = Any

S = TypeVar("S", bound="Settings")
NO_LIMITS: Mapping[str, Any] = {}

DEFAULT_GPU = "A100"
MODES, OBJECTIVES = ("inference", "training"), ("time", "memory", "flops")
SEEDS = 2**32
"""Every random generator takes a seed below it, from 0 on."""


@dataclass(frozen=True)
class Option:
    """How a field is given. help: in Markdown; takes: what its values are, for who gave another; shown: what stands for one.

    choices: what its values are; flag: on the command line, unless it is the name's, None where there is none.
    path: whether a value is a path from where it is written, always or where there is such a file ("place").
    """

    help: str
    takes: str = ""
    shown: str = ""
    choices: Callable[[], Collection[str]] | None = None
    flag: str | None = ""
    path: str = ""


def option(default: Any, help: str, *about: Any, limits: Mapping[str, Any] = NO_LIMITS, **more: Any) -> Any:
    """A field with its default. about, more: see Option; limits: see pydantic's Field."""
    return Field(default, json_schema_extra={"option": Option(help, *about, **more)}, **limits)  # type: ignore[dict-item]


def option_of(field: FieldInfo) -> Option | None:
    """How a field is given, if it is anybody's to give."""
    extra: Any = field.json_schema_extra or {}
    return extra.get("option")  # type: ignore[no-any-return]


def options_of(kind: type[Settings]) -> dict[str, Option]:
    """{field: how it is given}."""
    return {name: option for name, field in kind.model_fields.items() if (option := option_of(field)) is not None}


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError
    return value


def _device(value: Any) -> Any:
    try:
        check_device(value)
    except AuditorError as error:
        raise ValueError from error
    return value


def _ignores(value: Any) -> Any:
    return tuple(Ignore(one) if isinstance(one, str) else one for one in named(value))


def _path(value: Any) -> Any:
    if not isinstance(value, str | PathLike):
        raise ValueError
    return Path(value)


def named(given: Any) -> Any:
    """Names as they may be given: several, one, or `a,b` as on the command line; each once."""
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        return given
    parts = given.split(",") if isinstance(given, str) else given
    found = [part.strip() if isinstance(part, str) else part for part in parts]
    return tuple(name for place, name in enumerate(found) if name != "" and name not in found[:place])


Names = Annotated[tuple[str, ...], BeforeValidator(named)]
Ignores = Annotated[tuple[Ignore, ...], BeforeValidator(_ignores)]
Number = Annotated[float, BeforeValidator(_no_flag), Field(allow_inf_nan=False)]
Directory = Annotated[Path, BeforeValidator(_path)]
Device = Annotated[Any, AfterValidator(_device)]
Function = Callable[..., Any] | None

CODES = "codes such as NRM001, or the letters of a family"
TRUE = "True or False"


class Settings(BaseModel):
    """What is asked of an audit. Fields that are no option are found out before it begins.

    found: the device that the model is on; limits: the criteria, read; listener: who hears of progress; scoring: the function that scores, found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    kwargs: dict[str, Any] | None = option(
        None, "keyword arguments of every call", "a dict of keyword arguments", flag=None
    )
    formats: Names = option(
        DEFAULT,
        "what runs natively, or what torch has no arithmetic in, [and others](api.md#other-formats), to see what it would do",
        shown="LIST",
        choices=auditable,
    )
    strategies: Names = option(
        SHIPPED,
        "`autocast` (weights stay FP32; also trains), `cast` (weights stored low; for inference), `graph` (a "
        "[program](how-it-works.md#plans-that-are-programs), each operation with its precision), or "
        "[others](api.md#other-strategies)",
        shown="LIST",
        choices=known,
    )
    max_error: Number = option(
        0.01,
        "the budget: relative L2 error of the outputs, or what a metric of yours gives",
        "a positive number",
        "X",
        limits={"gt": 0},
    )
    criteria: Any = option(
        None,
        "what one output is held to, `'logits: kl <= 0.01'`; several may be given ([criteria](criteria.md)). The budget is for "
        "the outputs that none speaks of",
        shown="'OUTPUT: KIND <= X'",
        flag="--criterion",
    )
    metric: Function = option(
        None,
        "`metric(reference, candidate) -> float` over two lists of output tensors; smaller is better",
        "a function: metric(reference, candidate) -> a number",
        flag=None,
    )
    device: Device = option(
        "auto",
        "`auto` (the GPUs that the model is on, else the current one, else the CPU, which imitates one), `cpu`, `cuda`, `cuda:N`",
        "auto, cpu, cuda or cuda:N (a cpu imitates the formats of a GPU)",
        "DEVICE",
    )
    gpu: str | None = option(
        None,
        "the GPU that times and memory are predicted for; unless given the one that the audit runs on, else A100",
        choices=lambda: table("plan/devices"),
    )
    mode: str = option("inference", "`training` audits a [training step](training.md) too", choices=lambda: MODES)
    use: str = option("", "what the recommended plan is for; what the mode says unless given", choices=lambda: MODES)
    objective: str = option("time", "what plans save within the budget", choices=lambda: OBJECTIVES)
    quick: StrictBool = option(
        False,
        "the first of the formats and of the strategies alone, and the plan that is predicted to hold instead of the best that "
        "a search finds; it is verified as ever",
        TRUE,
    )
    measure_time: StrictBool | None = option(
        None,
        "[time](how-it-works.md#measured-time-and-memory) one forward, and take its peak memory, in FP32 and under every plan; "
        "unless given, on a GPU",
        TRUE,
    )
    evaluate: Any = option(
        None,
        "your own score, `func(model)`, in FP32 and under every verified plan ([scores](scores.md)): the function itself in "
        "Python, else `f.py:func` or a name in the target's file",
        shown="F",
        path="place",
    )
    max_drop: Number | None = option(
        None,
        "how much worse that score may be under a plan; not judged unless given",
        "a number from 0 on",
        "X",
        limits={"ge": 0},
    )
    better: str | None = option(
        None, "which scores are better; what the function says unless given, else higher", choices=lambda: DIRECTIONS
    )
    loss_fn: Function = option(
        None,
        "in training, `loss_fn(outputs, *targets) -> scalar`; without it, the loss that the model returns "
        "([training](training.md))",
        "a function: loss_fn(outputs, *targets) -> a scalar",
        flag=None,
    )
    rules: Directory | None = option(
        None, "a directory of your own rules, beside those that ship", "the path of a directory", "DIR", path="path"
    )
    select: Names = option((), "rules to report: codes, or the letters of families; all unless given", CODES, "LIST")
    ignore: Ignores = option((), "rules to leave out, likewise", CODES, "LIST")
    per_module_ignores: tuple[Ignore, ...] = option(
        (),
        "rules to leave out in modules: tables of `module` (a glob), `code` and `reason`",
        "a list of tables: module, code and reason, each a string",
        flag=None,
    )
    memory: ByteSize | None = option(
        None,
        "what each process of the audit may hold, as `4GB` or `512MiB`: weights and other large tensors lie in mapped files "
        "([larger than memory](scale.md#larger-than-memory)); the answer is the same. Linux only",
        "a size such as 4GB or 512MiB",
        "SIZE",
        limits={"gt": 0},
    )
    seed: Annotated[int, BeforeValidator(_no_flag), Field(ge=0, lt=SEEDS)] = option(
        0, "of every random choice", f"a whole number from 0 to {SEEDS - 1}", "N"
    )
    timeout: Number | None = option(
        None,
        "the command ends where there is no progress for so long, and a plan fails that takes so long to answer or to be "
        "scored; unless given never, and half an hour",
        "a positive number of seconds",
        "SECONDS",
        limits={"gt": 0},
    )
    progress: StrictBool | Function = option(
        None,
        "called as `progress(stage, detail, done, total)`; `total` is 0 where it is not known. What it raises ends the audit "
        "with [an error](errors.md#bad-callback) whose `__cause__` it is, so raising cancels an audit. `True` shows how far it "
        "is; notebooks show it unless `False` is given",
        "True, False or a function of four arguments",
        flag=None,
    )

    command: str = "auditor.audit(model, example_inputs)"
    found: str | None = None
    rulebook: tuple[Rule, ...] = ()
    limits: tuple[Criterion, ...] = ()
    listener: Callable[[str, str, int, int], None] | None = None
    scoring: Scoring | None = None

    @model_validator(mode="before")
    @classmethod
    def _for_what(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "use": given.get("use") or given.get("mode", MODES[0])}

    @field_validator("*", mode="after")
    @classmethod
    def _known(cls, value: Any, info: ValidationInfo) -> Any:
        option = option_of(cls.model_fields[str(info.field_name)])
        if option is not None and option.choices is not None and value is not None:
            wrong = [one for one in (value if isinstance(value, tuple) else (value,)) if one not in option.choices()]
            if wrong or value == ():
                raise ValueError(", ".join(wrong) or "none")
        return value

    @field_validator("select", "ignore", "per_module_ignores")
    @classmethod
    def _codes(cls, value: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        for one in value:
            code = one.code if isinstance(one, Ignore) else one
            if not re.fullmatch(r"[A-Z]{3}\d{0,3}", code):
                raise ValueError(repr(code))
            if info.field_name == "per_module_ignores" and not (one.module.strip() and one.reason.strip()):
                raise ValueError("one without a module or a reason")
        return value

    @model_validator(mode="after")
    def _together(self: S) -> S:
        trainable = [name for name in auditable() if runs(name)]
        if self.training and not set(self.formats) <= set(trainable):
            raise bad(f"a training step runs in {either(trainable)}, not in {', '.join(self.formats)}")
        if self.evaluate is None and self.scoring is None and (self.max_drop, self.better) != (None, None):
            raise bad("max_drop and better are about a score: give evaluate as well, or leave them out")
        if self.quick:
            self.__dict__.update(formats=self.formats[:1], strategies=self.strategies[:1])
        return self

    @property
    def where(self) -> str:
        """The device that the audit runs on: cpu, cuda:0, ...; several where `following` found a model on them.

        Raises: AuditorError(slug="no-cuda").
        """
        return self.found or chosen(self.device)

    def following(self: S, devices: Collection[str]) -> S:
        """The same for a model whose tensors are on these: an audit goes where its model is, unless told where to go."""
        return self.having(found=followed(self.device, devices))

    def having(self: S, **found: Any) -> S:
        """The same with what was found out."""
        return self.model_copy(update=found)

    @property
    def figures(self) -> str:
        """The row of plan/devices.toml that times are predicted by: what was asked for, else the GPU that the audit runs on
        where there is a row for it."""
        return self.gpu or row_of(name_of(self.where)) or DEFAULT_GPU

    @property
    def native(self) -> bool:
        """Whether a GPU runs the formats; a CPU imitates one otherwise."""
        return is_native(self.where)

    @property
    def times(self) -> bool:
        """Whether time and memory of plans are measured."""
        return has_clock(self.where) if self.measure_time is None else self.measure_time

    @property
    def scoped(self) -> tuple[str, ...]:
        """The strategies whose plans give scopes of the live model their precision."""
        return tuple(name for name in self.strategies if name not in GRAPHS)

    @property
    def as_graphs(self) -> bool:
        """Whether plans are wanted that are programs of their own."""
        return any(name in GRAPHS for name in self.strategies)

    @property
    def training(self) -> bool:
        """Whether a training step is audited too."""
        return self.mode == "training"

    @property
    def selection(self) -> Selection:
        """Which findings are wanted."""
        return Selection(self.select, (*self.ignore, *self.per_module_ignores))


def either(names: Collection[str]) -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def bad(message: str) -> AuditorError:
    """What is said of options that no audit can be asked."""
    return AuditorError(message, slug="bad-option")
