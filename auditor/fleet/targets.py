"""Reads the TOML file of a fleet: its models, each with the options of its audit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..asked import OPTIONS, Command, by_option, validate
from ..errors import AuditorError
from ..resources import tables

NOT_HERE = ("out", "format", "open", "dry_run", "baseline", "explain_layer", "quiet", "debug", "per_module_ignores")
"""Options of an audit that the TOML file may not set: the fleet sets them, or they only suit a single audit."""

SHORT = 100
"""Maximum length of a target's name, which becomes a folder's name."""


@dataclass(frozen=True)
class FleetTarget:
    """One model and its audit. words: the command line, without program and --out; folder: base of relative paths.

    directory: where the audit's files go. limit: seconds that the audit may take. retries: maximum number of restarts
    after a crash. threads: number of threads of the audit's process, unless OMP_NUM_THREADS is set.
    """

    name: str
    words: tuple[str, ...]
    folder: Path
    directory: Path = Path()
    limit: float | None = None
    retries: int = 0
    threads: int = 1


def read(file: Path) -> tuple[FleetTarget, ...]:
    """Read the targets of a file, in order. Raises: AuditorError(slug="bad-fleet"), with the file and the target."""
    table = tables(file, "bad-fleet")
    for unknown in table.keys() - {"target", "defaults"}:
        raise _bad(file, f"unknown table {unknown!r}: a file has [[target]] tables, and [defaults] for all targets")
    entries = table.get("target")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise _bad(file, "the file names no model: add a [[target]] table with name and target")
    shared = by_option(table.get("defaults", {}), f"{file}: [defaults]", "bad-fleet", NOT_HERE)
    targets = [_target(file, number, entry, shared) for number, entry in enumerate(entries, 1)]
    seen: dict[str, str] = {}
    for target in targets:
        if (other := seen.get(target.name.casefold())) is not None:
            raise _bad(file, f"the targets {other!r} and {target.name!r} would have one folder: rename one")
        seen[target.name.casefold()] = target.name
    return tuple(targets)


def _target(file: Path, number: int, entry: Mapping[str, Any], shared: Mapping[str, Any]) -> FleetTarget:
    given = dict(entry)
    name, target = given.pop("name", None), given.pop("target", None)
    if not isinstance(name, str) or not re.fullmatch(r"[\w][\w .+-]*", name) or len(name) > SHORT or name.endswith("."):
        allowed = f"letters, digits, spaces and . _ + -, at most {SHORT} characters"
        raise _bad(file, f"target {number} needs a name that a folder can have: {allowed}")
    if not isinstance(target, str) or not target:
        raise _bad(file, f"target {name!r} has no key `target`, which names the file or module of the model")
    place = f"{file}: target {name!r}"
    options = {**shared, **by_option(given, place, "bad-fleet", NOT_HERE)}
    try:
        validate(Command, options, place, "bad-fleet", options)
    except AuditorError as error:
        raise error if error.slug == "bad-fleet" else AuditorError(f"{place}: {error}", "bad-fleet") from error
    return FleetTarget(name, (*_words(options), target), file.resolve().parent)


def _words(given: Mapping[str, Any]) -> list[str]:
    """Convert options to command-line arguments, such as `--formats=fp16`."""
    words: list[str] = []
    for name, value in given.items():
        flag = str(OPTIONS[name].flag)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{OPTIONS[name].key}")
        elif isinstance(value, list) and name == "criteria":
            words += [f"{flag}={one}" for one in value]
        else:
            words.append(f"{flag}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return words


def _bad(file: Path, message: str) -> AuditorError:
    return AuditorError(f"{file}: {message}", slug="bad-fleet")
