"""Reads the package's data files, in a wheel or a checkout, and the user's TOML files."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import AuditorError

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """Path of the directory "rules", "reports" or "docs", in a wheel or a checkout."""
    return next(parent / name for parent in (_PACKAGE, _PACKAGE.parent) if (parent / name).is_dir())


@cache
def errors() -> dict[str, str]:
    """The explanation of every error, by slug: the sections of errors.md, as Markdown."""
    text = (resource_dir("docs") / "errors.md").read_text(encoding="utf-8")
    result = re.findall(r"(?ms)^#{2,3} ([a-z0-9-]+)\n(.*?)(?=^#{2,3} |\Z)", text)
    return {name: section.strip() for name, section in result if section.strip()}


@cache
def table(name: str) -> dict[str, Any]:
    """The contents of `auditor/<name>.toml`: facts about torch and devices, with sources."""
    return tomllib.loads((_PACKAGE / f"{name}.toml").read_text(encoding="utf-8"))


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: `2.15.0a0+git1` -> (2, 15, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


@cache
def torch_release() -> tuple[int, ...]:
    """The release of the installed torch, which is not imported for it; () without torch."""
    try:
        return release(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return ()


def tables(file: Path, slug: str) -> dict[str, Any]:
    """The contents of a TOML file. Raises: AuditorError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditorError(f"cannot read {file} ({error.strerror})", slug) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        line = re.search(r"at line (\d+)", str(error))
        raise AuditorError(f"{file}{f':{line[1]}' if line else ''}: {error}", slug) from error
