"""What was asked, in Python, on the command line or in a TOML file, held against the settings."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import StrictBool, ValidationError, model_validator

from .artefact.strategies import GRAPHS
from .config import Ignore, line_of, nearest
from .criteria import criteria_of
from .errors import AuditorError
from .report import reporters
from .resources import resource_dir
from .settings import TRUE, Directory, Settings, bad, either, option, options_of

if TYPE_CHECKING:
    from .rulebook.rule import Rule

S = TypeVar("S", bound=Settings)
LEVELS = ("error", "warning", "info", "never")


class Command(Settings):
    """What the command line asks beside that."""

    inputs: str | None = option(
        None,
        "`f.py:func`, `x.pt`, `x.safetensors`, `x.npz`, or shapes: `'x:float32[1,3,224,224] ids:int64[1,16]<1000'`",
        shown="I",
        path="place",
    )
    weights: str | None = option(
        None,
        "a checkpoint: safetensors, the index of a sharded one, or a torch file of plain tensors",
        shown="F",
        path="path",
    )
    loss: str | None = option(
        None, "in [training](training.md): `f.py:name`, or a name in the target's file", shown="L", path="place"
    )
    out: Directory | None = option(
        None, "directory of the files, `audits/<name>` unless given", "the path of a directory", "DIR", path="path"
    )
    fail_on: str = option("error", "exit with 1 for findings as severe as that, or more", choices=lambda: LEVELS)
    format: str = option(
        "text",
        "what stdout gets; `github`: annotations, and a summary on the job's page; `md`: to paste into a pull request",
        choices=reporters.names,
    )
    baseline: Directory | None = option(
        None,
        "a `plan.json`, or the directory of an audit: what it found does not fail this one",
        "the path of a plan.json",
        "PLAN",
        path="path",
    )
    explain_layer: str | None = option(
        None, "also say what each plan runs this module or operation in, and why not lower", shown="NAME"
    )
    model_explorer: StrictBool = option(
        False, "also write the graph and its measures for [Model Explorer](#model-explorer)", TRUE
    )
    onnx: str | None = option(
        None,
        "also plan as a graph, and write each of those plans as an ONNX model, checked, and run by onnxruntime in a fresh "
        "process; its inputs and outputs are in `fp32`, or with `--onnx=low` in the plan's format",
        choices=lambda: ("fp32", "low"),
    )
    open: StrictBool = option(False, "show the report in the browser when it is written", TRUE)
    dry_run: StrictBool = option(False, "say what was found and would be done, then stop", TRUE)
    quiet: StrictBool = option(False, "no progress on stderr", TRUE)
    debug: StrictBool = option(False, "tracebacks and the model's own warnings", TRUE)

    @model_validator(mode="after")
    def _in_order(self) -> Command:
        if self.loss and not self.training:
            raise bad("--loss is for training: add --mode training, or leave it out")
        if self.onnx and not self.as_graphs:
            if self.quick:
                raise bad(
                    f"--onnx writes plans of strategy {GRAPHS[0]}, and --quick plans {self.strategies[0]} alone: leave --quick "
                    f"out, or add --strategies {GRAPHS[0]}"
                )
            self.__dict__.update(strategies=(*self.strategies, *GRAPHS))
        return self


def flag_of(name: str) -> str:
    """What an option is on the command line."""
    return options_of(Command)[name].flag or f"--{name.replace('_', '-')}"


def key_of(name: str) -> str:
    """What an option is in a TOML file."""
    return flag_of(name).removeprefix("--")


def keyed(table: Mapping[str, Any], refusal: str, hidden: Collection[str] = ()) -> dict[str, Any]:
    """The entries of a TOML table by the names of the options.

    Raises: AuditorError(slug="bad-config") for a key that is none, with what may be meant.
    """
    known = {
        key_of(name): name
        for name, option in options_of(Command).items()
        if name not in hidden and (option.flag is not None or name == "per_module_ignores")
    }
    for key in (key.replace("_", "-") for key in table):
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise AuditorError(f"{refusal} {key!r}: {meant}", "bad-config")
    return {known[key.replace("_", "-")]: value for key, value in table.items()}


def configured(start: Path) -> tuple[str, dict[str, Any]]:
    """What the nearest [tool.auditor] says, by option, and where it stands. A path counts from the folder of its file.

    Raises: AuditorError(slug="bad-config").
    """
    file, table = nearest(start)
    place = f"{file}: [tool.auditor]"
    given = keyed(table, f"{place} has no key")
    for name, value in given.items():
        path = options_of(Command)[name].path if isinstance(value, str) else ""
        if path == "path" or (path and (file.parent / value.partition(":")[0]).is_file()):
            given[name] = str(file.parent / value)
        elif name in ("ignore", "per_module_ignores") and isinstance(value, list):
            given[name] = [_with_line(one, file) for one in value]
    return place, given


def _with_line(entry: Any, file: Path) -> Any:
    """An entry of the ignores, which knows where it stands."""
    if isinstance(entry, str):
        return Ignore(entry, source=line_of(file, entry))
    return {**entry, "source": line_of(file, str(entry.get("module")))} if isinstance(entry, dict) else entry


def asked(given: Mapping[str, Any]) -> Command:
    """What the command line asks, with what [tool.auditor] says of the rest. Raises: AuditorError."""
    place, defaults = configured(Path.cwd())

    def called(name: str) -> tuple[str, str]:
        return (flag_of(name), "bad-option") if name in given else (f"{place} {key_of(name)}", "bad-config")

    return checked(Command, {**defaults, **given}, called)


def on_the_line(args: Mapping[str, Any]) -> Command:
    """What the command line asks, of a verb that no TOML file is about. Raises: AuditorError(slug="bad-option")."""
    given = {name: value for name, value in args.items() if name in Command.model_fields and value is not None}
    return checked(Command, given, lambda name: (flag_of(name), "bad-option"))


def resolved(settings: S) -> S:
    """The settings with the rules and criteria that they name. Raises: AuditorError."""
    return settings.having(rulebook=rules_of(settings.rules), limits=criteria_of(settings.criteria))


def rules_of(directory: Path | None) -> tuple[Rule, ...]:
    """The rules that ship, and the user's own beside them. Raises: RuleError."""
    from .rulebook.load import load_rules

    return load_rules([resource_dir("rules"), *([directory] if directory else [])])


def checked(
    kind: type[S],
    given: Mapping[str, Any],
    called: Callable[[str], tuple[str, str]] = lambda name: (name, "bad-option"),
) -> S:
    """What was given, held against the types. called: how an option is named there, and the slug. Raises: AuditorError."""
    try:
        return kind(**given)
    except ValidationError as error:
        first: Any = error.errors()[0]
    name = str(first["loc"][0])
    if (option := options_of(kind).get(name)) is None:
        raise AuditorError(f"there is no argument {name!r}: `help(auditor.audit)` lists them", "bad-option")
    said, slug = called(name)
    takes = either([*option.choices()]) if option.choices is not None else option.takes
    wrong = str(first.get("ctx", {}).get("error", "")) or shown(first["input"])
    raise AuditorError(f"{said} takes {takes}, not {wrong}", slug)


def shown(value: Any) -> str:
    """A plain value as it is written, cut short; of anything else, its type."""
    plain = value is None or isinstance(value, str | bytes | bool | int | float)
    return repr(value)[:60] if plain else f"a value of type {type(value).__name__}"
