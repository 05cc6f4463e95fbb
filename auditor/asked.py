"""Reads and validates options from Python, the command line or a TOML file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ValidationError

from .artefact.strategies import GRAPHS
from .errors import AuditorError, suggest
from .report import FORMATS
from .resources import tables
from .settings import Directory, Flag, Option, Settings, bad, either, options_of

S = TypeVar("S", bound=Settings)
LEVELS = ("error", "warning", "info", "never")


class Command(Settings):
    """All settings of an audit, and options of the command line only."""

    inputs: Annotated[str | None, Option(shown="I", path="place")] = None
    """the model's inputs: `f.py:func`, `x.pt`, `x.safetensors`, `x.npz`, `prompts.txt`, `chats.jsonl`, or shapes such as
    `'x:float32[1,3,224,224] ids:int64[1,16]<1000'` (`<1000`: values below 1000)"""
    weights: Annotated[str | None, Option(shown="F", path="path")] = None
    """a checkpoint: a safetensors file, the index of a sharded checkpoint, or a torch file that contains only tensors"""
    loss: Annotated[str | None, Option(shown="L", path="place")] = None
    """the loss function of [training](training.md): `f.py:name`, or a name in the target's file"""
    out: Directory = None
    """output directory; by default `audits/<name>`, or `audits/<name>-rehearsal` for `rehearse`"""
    fail_on: Annotated[str, Option(choices=lambda: LEVELS)] = "error"
    """exit with code 1 if a finding has this severity or a higher one"""
    format: Annotated[str, Option(choices=lambda: FORMATS)] = "text"
    """format of the result on stdout; `github`: annotations and a job summary for GitHub Actions; `md`: Markdown for a
    pull request"""
    baseline: Annotated[Directory, Option("the path of a plan.json", "PLAN")] = None
    """the `plan.json` or directory of an earlier audit; findings known from that audit do not affect the exit code"""
    explain_layer: Annotated[str | None, Option(shown="NAME")] = None
    """also show the precision of this module or operation under each plan, with the reason if it stays in FP32"""
    model_explorer: Flag = False
    """also write the graph and its measured errors as files for Google's [Model Explorer](#model-explorer)"""
    onnx: Annotated[str | None, Option(choices=lambda: ("fp32", "low"))] = None
    """also make a plan of strategy `graph` for each format, and export these plans as ONNX models, which onnxruntime
    then runs. Inputs and outputs of the ONNX models are FP32, or with `--onnx=low` in the plan's format"""
    open: Flag = False
    """open the report in the browser"""
    dry_run: Flag = False
    """show which model, inputs and plans an audit would use, and exit"""
    quiet: Flag = False
    """show no progress on stderr"""
    debug: Flag = False
    """show tracebacks of errors, and warnings that the model's code issues"""

    def model_post_init(self, context: Any, /) -> None:
        """Check and complete the options of the command line too. Raises: AuditorError(slug="bad-option")."""
        super().model_post_init(context)
        if self.loss and not self.training:
            raise bad("--loss needs --mode training: add --mode training, or leave --loss out")
        if self.onnx and not {*GRAPHS} & {*self.strategies}:
            if self.quick:
                hint = f"leave --quick out, or pass --strategies {GRAPHS[0]}"
                raise bad(f"--onnx needs strategy {GRAPHS[0]}, and --quick audits only {self.strategies[0]}: {hint}")
            self.__dict__.update(strategies=(*self.strategies, *GRAPHS))


OPTIONS = options_of(Command)


def by_option(table: Any, place: str, slug: str, hidden: Collection[str] = ()) -> dict[str, Any]:
    """{option name: value} for the entries of a TOML table. place: the file and the table, for messages.

    Raises: AuditorError(slug) for an unknown key, with the closest known key.
    """
    if not isinstance(table, dict):
        raise AuditorError(f"{place} must be a table", slug)
    given = [name for name, option in OPTIONS.items() if option.flag or name == "per_module_ignores"]
    known = {OPTIONS[name].key: name for name in given if name not in hidden}
    for key in (key.replace("_", "-") for key in table):
        if key not in known:
            hint = suggest(key, known, f"the keys are {', '.join(known)}")
            raise AuditorError(f"{place} has an unknown option: {key!r}: {hint}", slug)
    return {known[key.replace("_", "-")]: value for key, value in table.items()}


def command_of(given: Mapping[str, Any], kind: type[S]) -> S:
    """The options of a command, with defaults from the nearest [tool.auditor] table. Relative paths in the table start at
    its file's folder.

    Raises: AuditorError(slug="bad-option" | "bad-config").
    """
    for file in (folder / "pyproject.toml" for folder in (Path.cwd(), *Path.cwd().parents)):
        tool = tables(file, "bad-config").get("tool") if file.is_file() else None
        if isinstance(tool, dict) and (table := tool.get("auditor")) is not None:
            break
    else:
        return validate(kind, given)
    place = f"{file}: [tool.auditor]"
    defaults = by_option(table, place, "bad-config")
    for name, value in defaults.items():
        path = OPTIONS[name].path if isinstance(value, str) else ""
        if path == "path" or (path and (file.parent / value.partition(":")[0]).is_file()):
            defaults[name] = str(file.parent / value)
        elif name in ("ignore", "per_module_ignores") and isinstance(value, list):
            defaults[name] = [_with_line(one, file) for one in value]
    return validate(kind, {**defaults, **given}, place, "bad-config", defaults.keys() - given.keys())


def _with_line(entry: Any, file: Path) -> Any:
    """An entry of `ignore` with its location, such as `pyproject.toml:12`: the first line that contains its value."""
    entry = {"code": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict):
        return entry
    value = re.compile(f"[\"']{re.escape(str(entry.get('module', entry.get('code'))))}[\"']")
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    return {**entry, "source": f"{file.name}:{next((number for number, line in lines if value.search(line)), 1)}"}


def validate(
    kind: type[S], given: Mapping[str, Any], place: str = "", slug: str = "bad-option", there: Collection[str] = ()
) -> S:
    """Validate options and return an instance of `kind`, a class of settings. Raises: AuditorError.

    there: names of the options that a TOML table sets, not Python or the command line. place: that file and table, for
    messages about these options. slug: the slug of the errors about them.
    """
    options = options_of(kind)
    for name in given:
        if name not in options:
            raise AuditorError(f"there is no argument {name!r}: see `help(auditor.audit)`", "bad-option")
    try:
        return kind(**given)
    except ValidationError as error:
        first: Any = error.errors()[0]
    option, name = options[first["loc"][0]], first["loc"][0]
    takes = either([*option.choices()]) if option.choices and option.takes == Option.takes else option.takes
    plain = first["input"] is None or isinstance(first["input"], str | bytes | bool | int | float)
    short = repr(first["input"])[:60] if plain else f"a value of type {type(first['input']).__name__}"
    message = f"takes {takes}, not {str(first.get('ctx', {}).get('error', '')) or short}"
    if name in there:
        raise AuditorError(f"{place}: {option.key} {message}", slug)
    raise bad(f"{name if kind is Settings else option.flag or name} {message}")
