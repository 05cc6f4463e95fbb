"""All options of an audit: name, type, default and description, in Markdown.

The command line, `auditor.audit()`, `[tool.auditor]`, a fleet's TOML, the tables of the docs and `__init__.pyi` are
generated from this module. Importing this module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, StrictBool
from pydantic_core import CoreSchema, core_schema

from .artefact.strategies import GRAPHS, SHIPPED, STRATEGIES
from .criteria import criteria_of
from .errors import AuditorError
from .numerics.cpus import cpu_row
from .numerics.devices import (
    CPU,
    NATIVE_CPU,
    TARGETS,
    choose,
    gpus,
    has_clock,
    is_native,
    kind_and_number,
    name_of,
    row_of,
)
from .numerics.formats import DEFAULT, auditable, format_called, runs
from .numerics.schemes import SCHEMES
from .records.measure import CODE, Ignore
from .records.plan import DIRECTIONS
from .resources import resource_dir
from .rulebook.rule import Rule

if TYPE_CHECKING:
    from .score import ScoreFunction
else:  # else pydantic would import torch for this type
    ScoreFunction = Any

ABOUT_GPUS = "HWR"
"""Letters of the rules about the hardware of GPUs: sizes that fit tensor cores, and TF32."""

BOTH = "both"
"""Value of `on`: the CPU is the target, and its plans are compared with those for CUDA."""

MODES, OBJECTIVES = ("inference", "training"), ("time", "memory", "flops")

TAKEN = "fp16, bf16, fp8_e4m3, fp8_e5m2, or a quantization scheme such as fp8, int8, mxfp4 or nvfp4"


@dataclass(frozen=True)
class Option:
    """How users pass a field. takes: the type in error messages; shown: the placeholder in help.

    choices: allowed values; flag: the command-line flag, if it differs from the name; "" for a positional argument, or
    if there is no flag. key: the name in a TOML file. path: "path" if values are paths relative to the file that sets
    them; "place" if a value is such a path only if the file exists. typed: the accepted type, if wider than the
    field's; help: the description.
    """

    takes: str = "a string"
    shown: str = ""
    choices: Callable[[], Collection[str]] | None = None
    flag: str | None = None
    key: str = ""
    path: str = ""
    typed: str = ""
    help: str = ""

    @property
    def plain_help(self) -> str:
        """The description without Markdown links."""
        return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", self.help)

    def __get_pydantic_core_schema__(self, kind: Any, build: Callable[[Any], CoreSchema]) -> CoreSchema:
        """The schema of the annotated type, and then a check of the choices."""
        return core_schema.no_info_after_validator_function(self._check, build(kind))

    def _check(self, value: Any) -> Any:
        if self.choices is not None and value is not None:
            wrong = [one for one in (value if isinstance(value, tuple) else (value,)) if one not in self.choices()]
            if wrong or value == ():
                raise ValueError(", ".join(wrong) or "none")
        return value


def options_of(kind: type[BaseModel]) -> dict[str, Option]:
    """{field: its Option} for the fields that users can set, which are the fields with a docstring."""
    result = {}
    for name, field in kind.model_fields.items():
        if field.description is not None:
            kebab = name.replace("_", "-")
            about = {"flag": "" if field.is_required() else f"--{kebab}", "help": " ".join(field.description.split())}
            given = [vars(part) for part in field.metadata if isinstance(part, Option)]
            about |= {key: value for part in given for key, value in part.items() if value != Option.__dict__[key]}
            about["key"] = about["flag"].removeprefix("--") or kebab
            result[name] = Option(**about)  # type: ignore[arg-type]
    return result


def with_flags(text: str) -> str:
    """Rewrite arguments of `auditor.audit()` in a description as command-line options: `max_drop` -> `--max-drop`."""
    flags = {f"`{name}`": f"`{option.flag}`" for name, option in options_of(Settings).items() if option.flag}
    return re.sub(r"`\w+`", lambda name: flags.get(name[0], name[0]), text)


def split_names(given: Any) -> Any:
    """Names from a list, or from a string such as `a` or `a,b`, without duplicates."""
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        return given
    parts = given.split(",") if isinstance(given, str) else given
    result = [part.strip() if isinstance(part, str) else part for part in parts]
    return tuple(name for place, name in enumerate(result) if name != "" and name not in result[:place])


def split_formats(given: Any) -> Any:
    """Names of formats from names, torch's names such as `float16`, or torch's dtypes; a single one or several."""
    is_one = not isinstance(given, Iterable) or isinstance(given, bytes | Mapping)
    names = split_names((given,) if is_one else given)
    return split_names([format_called(name) for name in names])


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError
    return value


def _require_reason(value: Ignore) -> Ignore:
    if not (value.module.strip() and value.reason.strip()):
        raise ValueError("an entry without a module or a reason")
    return value


SEVERAL = Option(shown="LIST", typed="str | Iterable[str]")
CODES = Option("codes such as NRM001, or the letters of a family")
Names = Annotated[tuple[str, ...], BeforeValidator(split_names), SEVERAL]
DTYPES = Option(typed="str | torch.dtype | Iterable[str | torch.dtype]")
Formats = Annotated[tuple[str, ...], BeforeValidator(split_formats), SEVERAL, DTYPES]
Codes = Annotated[tuple[Annotated[str, Field(pattern=CODE)], ...], BeforeValidator(split_names), SEVERAL, CODES]
NotWanted = Annotated[Ignore, BeforeValidator(lambda one: {"code": one} if isinstance(one, str) else one)]
Ignores = Annotated[tuple[NotWanted, ...], BeforeValidator(split_names), SEVERAL, CODES]
Number = Annotated[float, BeforeValidator(_no_flag), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_no_flag)]
Flag = Annotated[StrictBool, Option("True or False")]
A_DIRECTORY = Option("the path of a directory", "DIR", path="path", typed="str | PathLike[str] | None")
Location = Annotated[Path, A_DIRECTORY]
Directory = Annotated[Path | None, A_DIRECTORY]
Seconds = Annotated[Number | None, Field(gt=0), Option("a positive number of seconds", "SECONDS")]
Function = Callable[..., Any] | None


class Settings(BaseModel):
    """The keyword arguments of `auditor.audit()`, and values derived from them.

    resolved_device: the audit's device, once the model is loaded; scoring: the imported scoring function. schemes: the
    quantization schemes among the user's `formats`, moved from there. for_cuda: {name: the plan for CUDA}, with which an
    audit for a CPU compares its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)

    kwargs: Annotated[dict[str, Any] | None, Option("a dict of keyword arguments", flag="")] = None
    """keyword arguments for every call of the model"""
    formats: Annotated[Formats, Option(TAKEN, choices=lambda: (*auditable(), *SCHEMES))] = DEFAULT
    """number formats to audit: `fp16`, `bf16`, `fp8_e4m3` or `fp8_e5m2`, or torch's `float16`, `torch.bfloat16`; formats in which torch has few operations,
    [such as FP8](api.md#other-formats), are emulated by rounding. A [quantization scheme](quantization.md), such as
    `fp8`, `int8` or `nvfp4`, audits every layer with a weight under that scheme; if only schemes are given, BF16 is
    audited too"""
    strategies: Annotated[Names, Option(choices=lambda: STRATEGIES)] = SHIPPED
    """how low precision is applied: `autocast` (weights stay FP32; also for training), `cast` (weights stored in low
    precision; for inference), or `graph` (a [program](method.md#plans-that-are-programs) with a precision for
    each operation)"""
    max_error: Annotated[Number, Field(gt=0), Option("a positive number", "X")] = 0.01
    """the error budget, the largest acceptable error of the outputs: relative L2 against FP32 (in Python, `metric` replaces
    it)"""
    criteria: Annotated[Any, AfterValidator(criteria_of), Option(shown="'OUTPUT: KIND <= X'", flag="--criterion")] = ()
    """a limit for one output, such as `'logits: kl <= 0.01'`; see [docs/criteria.md](criteria.md). May be repeated; in
    Python, a list or a dict such as `{'logits': 'kl <= 0.01'}`. For all other outputs the error budget applies"""
    metric: Annotated[Function, Option("a function: metric(reference, candidate) -> a number", flag="")] = None
    """`metric(reference, candidate) -> float` over two lists of output tensors; smaller is better, unless
    `metric.higher_is_better` is True: the error is then the loss against equal outputs"""
    device: Annotated[
        Any,
        AfterValidator(lambda value: kind_and_number(value) and value),
        Option("auto, cpu, cuda or cuda:N (the CPU emulates a GPU's formats)", "DEVICE"),
    ] = "auto"
    """device of the audit: `auto`, `cpu`, `cuda` or `cuda:N`. With `auto`, the GPUs that hold the model, else the current GPU,
    else the CPU. The CPU emulates a GPU"""
    on: Annotated[str, Option(choices=lambda: (*TARGETS, BOTH))] = "cuda"
    """where the model is to run in low precision: `cuda`, or `cpu` for [this machine's CPU](cpu.md), whose own kernels then
    run the formats; `both` audits for the CPU, and compares its plans with those for CUDA"""
    gpu: Annotated[str | None, Option(choices=gpus)] = None
    """the GPU for which times and memory are predicted; by default the audit's GPU if it is one of these, else A100"""
    mode: Annotated[str, Option(choices=lambda: MODES)] = "inference"
    """`training` also audits a [training step](training.md)"""
    use: Annotated[str, Option(choices=lambda: MODES)] = ""
    """purpose of the recommended plan; by default the same as `mode`"""
    objective: Annotated[str, Option(choices=lambda: OBJECTIVES)] = "time"
    """what to minimize within the error budget: predicted time, memory, or FLOPs in FP32"""
    quick: Flag = False
    """audit only the first format and the first strategy, and do not search for the best plan: verify the first plan
    that is predicted to meet the error budget"""
    measure_time: Annotated[StrictBool | None, Option("True or False")] = None
    """measure the [time](method.md#measured-time-and-memory) and peak memory of one forward pass, in FP32 and under
    every plan; by default on a GPU, and with `on` `cpu`"""
    evaluate: Annotated[Any, Option(shown="F", path="place")] = None
    """your own scoring function, called as `func(model)` in FP32 and under every verified plan. On the command line:
    `f.py:func`, or a name in the target's file. See [docs/scores.md](scores.md)"""
    max_drop: Annotated[Number | None, Field(ge=0), Option("a number from 0 on", "X")] = None
    """largest allowed loss of score against FP32, in the unit of the score; by default any loss is allowed"""
    better: Annotated[str | None, Option(choices=lambda: DIRECTIONS)] = None
    """whether higher or lower scores are better; by default `lower` if the function of `evaluate` has
    `lower_is_better = True`, else `higher`"""
    generate: Annotated[Whole | None, Field(ge=1), Option("a whole number of tokens, 1 or more", "N")] = None
    """[generate](generation.md) this many tokens in FP32, with the inputs as prompts. Under every verified plan, the
    model reads the same tokens with its own key-value cache, and its token choices are compared with FP32's"""
    temperature: Annotated[Number, Field(ge=0), Option("a number from 0 on", "T")] = 0.0
    """sampling temperature for `generate`; random numbers come from `seed`; 0: always the likeliest token"""
    loss_fn: Annotated[Function, Option("a function: loss_fn(outputs, *targets) -> a scalar", flag="")] = None
    """the loss of a training step, `loss_fn(outputs, *targets) -> scalar`; by default the loss that the model returns
    ([training](training.md))"""
    rules: Directory = None
    """a directory of your own rules, in addition to the built-in ones"""
    select: Codes = ()
    """rules to report, by code such as NRM001 or family such as NRM; by default all"""
    ignore: Ignores = ()
    """rules to suppress, by code such as NRM001 or family such as NRM"""
    per_module_ignores: Annotated[
        tuple[Annotated[Ignore, AfterValidator(_require_reason)], ...],
        Option("a list of tables: module, code and reason, each a string", flag="", typed="Iterable[dict[str, str]]"),
    ] = ()
    """rules to suppress in some modules: a list of tables with `module` (a glob pattern), `code` and `reason`"""
    memory: Annotated[
        ByteSize | None, Field(gt=0), Option("a size such as 4GB or 512MiB", "SIZE", typed="str | int | None")
    ] = None
    """memory limit of each process, e.g. `4GB` or `512MiB`. Large tensors, weights included, are stored on disk, so
    [the model may exceed memory](memory.md); the results are the same. Linux only"""
    # every random generator accepts seeds below 2**32
    seed: Annotated[Whole, Field(ge=0, lt=2**32), Option(f"a whole number from 0 to {2**32 - 1}", "N")] = 0
    """seed of every random choice"""
    timeout: Seconds = None
    """stop after this many seconds without progress (by default, never); an audit also gives each plan this time to run or
    be scored (by default, 1800)"""
    progress: Annotated[StrictBool | Function, Option("True, False or a function of four arguments", flag="")] = None
    """a function, called as `progress(stage, detail, done, total)`; `total` is 0 if unknown. If the function raises,
    the audit ends with [an error](errors.md#bad-callback), whose `__cause__` is that exception. `True` shows a progress
    line; notebooks show one by default"""

    command: str = "auditor.audit(model, example_inputs)"
    resolved_device: str | None = None
    scoring: ScoreFunction | None = None
    schemes: tuple[str, ...] = ()
    for_cuda: Mapping[str, Any] | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Check options that depend on one another, and complete them. Raises: AuditorError(slug="bad-option")."""
        trainable = [name for name in auditable() if runs(name)]
        if self.training and (other := [x for x in self.formats if x not in (*trainable, *SCHEMES)]):
            raise bad(f"mode='training' supports {either(trainable)}, not {', '.join(other)}: change `formats`")
        if self.evaluate is None and self.scoring is None and (self.max_drop, self.better) != (None, None):
            raise bad("`max_drop` and `better` need `evaluate`: give `evaluate` as well, or leave both out")
        if self.generate is None and self.temperature:
            raise bad("`temperature` needs `generate`: give `generate` as well, or leave `temperature` out")
        if self.generate is not None and self.training:
            raise bad("`generate` works in mode='inference' only: leave `generate` or mode='training' out")
        if self.on != "cuda":
            self._check_cpu()
        if self.loss_fn is not None and not self.training:
            raise bad("`loss_fn` is for mode='training': pass both, or neither")
        schemes = tuple(name for name in self.formats if name in SCHEMES)
        formats = tuple(name for name in self.formats if name not in SCHEMES) or ("bf16",)  # of all other layers
        most = 1 if self.quick else None
        self.__dict__.update(use=self.use or self.mode, schemes=schemes, formats=formats[:most])
        self.__dict__.update(strategies=self.strategies[:most])

    def _check_cpu(self) -> None:
        """Check the options that an audit for a CPU does not take."""
        kind, _ = kind_and_number(self.device)
        if kind not in ("auto", CPU):
            raise bad(f"on={self.on!r} audits this machine's CPU, not {self.device}: leave `device` out")
        if self.gpu is not None:
            raise bad(f"`gpu` is for times on a GPU, and on={self.on!r} measures times: leave one of them out")

    @cached_property
    def rulebook(self) -> tuple[Rule, ...]:
        """The built-in rules and the user's own; where the CPU is the target, without those about GPUs, and with their
        texts for CPUs. Raises: AuditorError, also if `select` matches none of them."""
        from .rulebook.load import load_rules
        from .rulebook.rule import for_cpu

        result = load_rules([resource_dir("rules"), *([self.rules] if self.rules else [])])
        for code in self.select:
            if not any(rule.code.startswith(code) for rule in result):
                lists = "`python -m auditor rules` lists all codes"
                raise AuditorError(f"`select` matches no rule: no code begins with {code!r}; {lists}", slug="no-rule")
        if self.on != "cuda":
            return tuple(for_cpu(rule) for rule in result if not rule.code.startswith(ABOUT_GPUS))
        return tuple(result)

    @property
    def where(self) -> str:
        """The device of the audit: cpu, cuda:0, the GPUs of the model, or NATIVE_CPU. Raises:
        AuditorError(slug="no-cuda")."""
        if self.on != "cuda":
            return NATIVE_CPU
        return self.resolved_device or choose(self.device)

    @property
    def gpu_spec(self) -> str:
        """The row of plan/devices.toml for predicted times: the CPU's as the target; otherwise the requested GPU, by
        default the audit's, if listed, else A100."""
        if self.where == NATIVE_CPU:
            return cpu_row()
        return self.gpu or row_of(name_of(self.where)) or "A100"

    @property
    def native(self) -> bool:
        """Whether the device runs the formats natively; otherwise a CPU emulates a GPU."""
        return is_native(self.where)

    @property
    def times(self) -> bool:
        """Whether time and memory of plans are measured."""
        return has_clock(self.where) if self.measure_time is None else self.measure_time

    @property
    def scope_strategies(self) -> tuple[str, ...]:
        """The strategies that patch a live model."""
        return tuple(name for name in self.strategies if name not in GRAPHS)

    @property
    def training(self) -> bool:
        """Whether a training step is audited too."""
        return self.mode == "training"

    @property
    def ignores(self) -> tuple[Ignore, ...]:
        """All entries that suppress findings, in all modules or in some modules."""
        return (*self.ignore, *self.per_module_ignores)


def either(names: Collection[str]) -> str:
    """Join names: `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def bad(message: str) -> AuditorError:
    """The error for an invalid option."""
    return AuditorError(message, slug="bad-option")
