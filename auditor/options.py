"""What an audit is asked to do: one record, checked once, for the public call and the command line alike.

Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from os import PathLike
from typing import TYPE_CHECKING, Any

from .artefact.strategies import GRAPHS, SHIPPED, known
from .config import EVERYTHING, Selection
from .criteria import Criterion
from .devices import chosen, followed, has_clock, is_native, name_of, row_of
from .errors import AuditorError
from .numerics.formats import DEFAULT, auditable, runs
from .records import Distance, Progress
from .resources import table
from .sizes import size_of

if TYPE_CHECKING:
    from .rulebook.rule import Rule
    from .score import Scoring

DEFAULT_GPU = "A100"
MODES = ("inference", "training")
OBJECTIVES = ("time", "memory", "flops")
SEEDS = 2**32
"""Every random generator takes a seed below it, from 0 on."""


def is_seed(value: Any) -> bool:
    """Whether every random generator takes it."""
    return isinstance(value, Integral) and not _is_flag(value) and 0 <= int(value) < SEEDS


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not _is_flag(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, bytes | Mapping)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


_NAMES = "a name, or several in a list"
TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kwargs": (lambda value: value is None or isinstance(value, Mapping), "a dict of keyword arguments"),
    "formats": (_is_names, _NAMES),
    "strategies": (_is_names, _NAMES),
    "max_error": (_is_number, "a positive number"),
    "max_drop": (lambda value: value is None or _is_number(value), "a number from 0 on"),
    "metric": (_is_function, "a function: metric(reference, candidate) -> a number"),
    "loss_fn": (_is_function, "a function: loss_fn(outputs, *targets) -> a scalar"),
    "progress": (lambda value: _is_flag(value) or _is_function(value), "True, False or a function of four arguments"),
    "gpu": (lambda value: value is None or isinstance(value, str), "the name of a GPU, such as 'A100'"),
    "rules": (lambda value: value is None or isinstance(value, str | PathLike), "the path of a directory"),
    "seed": (is_seed, f"a whole number from 0 to {SEEDS - 1}"),
    "quick": (_is_flag, "True or False"),
    "measure_time": (lambda value: value is None or _is_flag(value), "True, False or None"),
}
"""{argument of the public call: what is true of its values, what these are in words}. Others are checked where they are read."""


@dataclass(frozen=True)
class Options:
    """Raises: AuditorError(slug="bad-option" or "no-cuda") for what no audit can be asked.

    max_error: budget for the relative L2 error of the outputs, or for `metric(reference, candidate)`, of all outputs that no criterion speaks of. device: where it
    runs, as `devices.chosen` takes it; found: where that is, once there is a model. gpu: the one that times are predicted for, a row of plan/devices.toml; see figures. rules: those that are tried;
    selection: those of their findings that are wanted. objective: what plans save within the budget. wanted_for:
    inference or training, what the recommended plan is for, the mode unless given. command: what the user called, for the report.
    timeout: seconds that a plan may take to answer in the process that verifies it, and one score, half an hour unless given.
    scoring: the user's own function that scores the model.
    measure_time: whether times are measured, on a GPU that times itself unless somebody said.
    quick: of several formats and strategies the first alone, and the plan that is predicted to hold, with no search.
    memory: bytes that may be resident, as `size_of` takes it.
    """

    rules: tuple[Rule, ...]
    command: str
    formats: tuple[str, ...] = DEFAULT
    strategies: tuple[str, ...] = SHIPPED
    max_error: float = 0.01
    metric: Distance | None = None
    criteria: tuple[Criterion, ...] = ()
    device: Any = "auto"
    found: str | None = None
    gpu: str | None = None
    mode: str = "inference"
    objective: str = "time"
    wanted_for: str | None = None
    seed: int = 0
    timeout: float | None = None
    scoring: Scoring | None = None
    quick: bool = False
    measure_time: bool | None = None
    selection: Selection = EVERYTHING
    progress: Progress | None = None
    memory: int | str | None = None

    def __post_init__(self) -> None:
        check_names("formats", self.formats, auditable())
        check_names("strategies", self.strategies, known())
        check_names("modes", (self.mode,), MODES)
        check_names("objectives", (self.objective,), OBJECTIVES)
        check_names("uses", (self.use,), MODES)
        if self.training:
            trainable = [name for name in auditable() if runs(name)]
            check_names("formats that a training step runs in", self.formats, trainable)
        check_budget(self.max_error)
        if self.gpu is not None and self.gpu not in (figures := table("plan/devices")):
            raise AuditorError(
                f"there are no figures for {self.gpu!r}: gpu is one of {', '.join(figures)}", slug="bad-option"
            )
        chosen(self.device)
        if self.memory is not None:
            object.__setattr__(self, "memory", size_of(self.memory))
        if self.quick:
            object.__setattr__(self, "formats", self.formats[:1])
            object.__setattr__(self, "strategies", self.strategies[:1])

    @property
    def where(self) -> str:
        """The device that the audit runs on: cpu, cuda:0, ...; several where `following` found a model on them."""
        return self.found or chosen(self.device)

    def following(self, devices: Collection[str]) -> Options:
        """The same for a model whose tensors are on these: an audit goes where its model is, unless told where to go."""
        return replace(self, found=followed(self.device, devices))

    @property
    def figures(self) -> str:
        """The row of plan/devices.toml that times are predicted by: what was asked for, else the GPU that the audit runs on
        where there is a row for it."""
        return self.gpu or row_of(name_of(self.where)) or DEFAULT_GPU

    @property
    def most_resident(self) -> int | None:
        """Bytes that this process may hold; None for as many as it takes."""
        return None if self.memory is None else size_of(self.memory)

    @property
    def native(self) -> bool:
        """Whether a GPU runs the formats; a CPU imitates one otherwise."""
        return is_native(self.where)

    @property
    def times(self) -> bool:
        """Whether time and memory of plans are measured."""
        return has_clock(self.where) if self.measure_time is None else self.measure_time

    @property
    def use(self) -> str:
        """What the recommended plan is for: what was said, else what the audit is about."""
        return self.wanted_for or self.mode

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


def named(given: str | Iterable[str]) -> tuple[Any, ...]:
    """Names as they may be given: several, one, or `a,b` as on the command line; each once."""
    found: list[Any] = []
    for part in given.split(",") if isinstance(given, str) else given:
        name = part.strip() if isinstance(part, str) else part
        if name != "" and name not in found:
            found.append(name)
    return tuple(found)


def check_types(arguments: Mapping[str, Any]) -> None:
    """Raises: AuditorError(slug="bad-option") for the first argument in TYPES whose value is of another type."""
    for name, (fits, words) in TYPES.items():
        if name in arguments and not fits(arguments[name]):
            raise AuditorError(f"{name} takes {words}, not {_words_of(arguments[name])}", slug="bad-option")


def _words_of(value: Any) -> str:
    """A plain value as it is written, cut short; of anything else, its type."""
    plain = value is None or isinstance(value, str | bytes | bool | int | float)
    return repr(value)[:60] if plain else f"a value of type {type(value).__name__}"


def check_names(what: str, given: tuple[Any, ...], known: Collection[str]) -> None:
    """Raises: AuditorError(slug="bad-option") where nothing was given, or a name that is not known."""
    wrong = [name if isinstance(name, str) else _words_of(name) for name in given if not _is_known(name, known)]
    if wrong or not given:
        listed = " and ".join(filter(None, [", ".join([*known][:-1]), [*known][-1]]))
        raise AuditorError(f"{what} are {listed}, not {', '.join(wrong) or 'none'}", slug="bad-option")


def _is_known(name: Any, known: Collection[str]) -> bool:
    return isinstance(name, str) and name in known


def check_budget(max_error: float) -> None:
    """Raises: AuditorError(slug="bad-option") for what no error can stay within."""
    if not 0 < max_error < float("inf"):
        raise AuditorError(f"max_error is a positive number, not {max_error}", slug="bad-option")


def check_drop(max_drop: float) -> None:
    """Raises: AuditorError(slug="bad-option") for what no score can be worse by."""
    if not 0 <= max_drop < float("inf"):
        raise AuditorError(f"max_drop is a number from 0 on, not {max_drop}", slug="bad-option")
