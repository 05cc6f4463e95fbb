"""targets.toml: the models of a fleet, each with the options of its audit."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AuditorError

OWN = ("name", "target")
"""Keys of a `[[target]]` that are not options of an audit."""

NOT_HERE = ("out", "format", "open", "dry_run", "baseline", "explain_layer", "quiet", "debug", "version", "help")
"""Options of an audit that are the fleet's to give, or that answer on a terminal."""

REPEATED = ("criterion",)
"""Options that may be given several times: a list of them is that."""

SHORT = 100
"""The longest name of a target: it is a folder's."""


@dataclass(frozen=True)
class Target:
    """One model. words: the command line of its audit after the program, without --out; folder: where paths in it count from."""

    name: str
    words: tuple[str, ...]
    folder: Path


def read(
    file: Path, known: Mapping[str, Sequence[str]], check: Callable[[Sequence[str]], str | None]
) -> tuple[Target, ...]:
    """The targets of a file, in their order.

    known: an audit's options by name, with underscores: how each is written, and how it is switched off, where that can be
    said. check: what is wrong with the words of a command line, if anything. Raises: AuditorError(slug="bad-fleet"), naming the file and the target.
    """
    table = _table(file)
    unknown = sorted(table.keys() - {"target", "defaults"})
    if unknown:
        raise _bad(
            file, f"there is no table {unknown[0]!r}: it holds [[target]] tables, and [defaults] for all of them"
        )
    entries = table.get("target")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise _bad(file, "it names no model: add a [[target]] table with name and target")
    options = {name: words for name, words in known.items() if name not in NOT_HERE}
    shared = _options(file, "[defaults]", table.get("defaults", {}), options)
    targets = [_target(file, number, entry, shared, options, check) for number, entry in enumerate(entries, 1)]
    seen: dict[str, str] = {}
    for target in targets:
        other = seen.setdefault(target.name.casefold(), target.name)
        if other is not target.name:
            raise _bad(file, f"two targets are called {target.name!r}: names are folders, give each its own")
    return tuple(targets)


def _table(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad(file, f"it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _bad(file, str(error)) from error


def _target(
    file: Path,
    number: int,
    entry: Mapping[str, Any],
    shared: Mapping[str, Any],
    options: Mapping[str, Sequence[str]],
    check: Callable[[Sequence[str]], str | None],
) -> Target:
    name = entry.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w][\w .+-]*", name) or len(name) > SHORT or name.endswith("."):
        raise _bad(
            file,
            f"target {number} needs a name of letters, digits, spaces and . _ + - that is a folder's, of {SHORT} at most",
        )
    target = entry.get("target")
    if not isinstance(target, str) or not target:
        raise _bad(file, f"target {name!r} has no `target`: the file or module that holds the model")
    given = {key: value for key, value in entry.items() if key not in OWN}
    own = _options(file, f"target {name!r}", given, options)
    words = (*_words({**shared, **own}, options), target)
    if (wrong := check(words)) is not None:
        raise _bad(file, f"target {name!r}: {wrong}")
    return Target(name, words, file.resolve().parent)


def _options(file: Path, where: str, given: Any, options: Collection[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _bad(file, f"{where} is no table")
    found = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in options:
            close = difflib.get_close_matches(name, options, n=1)
            hint = f": did you mean {close[0].replace('_', '-')}?" if close else ""
            raise _bad(file, f"{where} has {key!r}, which is no option of an audit in a fleet{hint}")
        if isinstance(value, dict):
            raise _bad(file, f"{where}: {key} must be a plain value, not a table")
        found[name] = value
    return found


def _words(given: Mapping[str, Any], options: Mapping[str, Sequence[str]]) -> list[str]:
    words: list[str] = []
    for name, value in given.items():
        option, *off = options[name]
        if isinstance(value, bool):
            words += [option] if value else off
        elif isinstance(value, list) and name in REPEATED:
            words += [f"{option}={one}" for one in value]
        else:
            words.append(f"{option}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return words


def _bad(file: Path, message: str) -> AuditorError:
    return AuditorError(f"{file}: {message}", slug="bad-fleet")
