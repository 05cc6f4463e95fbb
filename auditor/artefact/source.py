"""Locates the user's source and checkpoint, and builds the model; `patched_model.py` contains a copy of this module."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..isolation.members import unwrap_model
from ..loading.importer import as_script, digest_of, import_source, root_of, with_names
from ..loading.statedicts import load_state, read_checkpoint


def make_original(source: dict[str, Any], file: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """Build the model from its source. file: the path of patched_model.py.

    Raises: ValueError or FileNotFoundError if the source or the checkpoint has changed.
    """
    with user_module(source, file) as module:
        made = module
        for part in source["symbol"].split("."):
            if not hasattr(made, part):
                where = source["path"] or source["module"]
                raise ValueError(
                    f"{where} no longer defines {source['symbol']!r}: audit the model again, or edit SOURCE in {file}"
                )
            made = getattr(made, part)
        if source["kind"] != "instance":
            folder = (str(locate(source["folder"], file)),) if source.get("folder") and not args else ()
            args = args or with_names(tuple(source["init_args"]), module)
            made = made(*folder, *args, **(kwargs or with_names(dict(source["init_kwargs"]), module)))
            made = made.module() if source["kind"] == "program" else made
        else:
            with contextlib.suppress(Exception):  # the source module keeps the unpatched model, if it can be copied
                made = copy.deepcopy(made)
        model: nn.Module = made["model"] if source["kind"] == "spec" else made
    if source["weights"]:
        path = locate(source["weights"], file)
        load_state(unwrap_model(model), read_checkpoint(path), path.name)
    return model


DIRECTORIES: dict[tuple[str, Path], Path] = {}
"""{(file or module, working directory before its import): the directory after it}."""


@contextmanager
def user_module(source: dict[str, Any], file: str) -> Iterator[Any]:
    """Import the user's module; in the body, `sys.path`, `sys.argv` and the working directory are as in the audit.

    Raises: FileNotFoundError for a relative path of the user's code if the audit's working directory is not there.
    """
    file = str(Path(file).resolve())
    name, path = source["module"] or Path(source["path"]).stem, None
    folders = [Path(file).parent / source["working_directory"]] if source["working_directory"] else []
    at = folders[0].resolve() if folders else Path.cwd()
    if source["path"]:
        path = locate(source["path"], file, source["digest"])
        folders = [Path(root_of(name, path)), *folders, path.parent]
    words = [str(path or name), *source.get("words", ())]
    with as_script(words, [str(folder.resolve()) for folder in folders]):
        try:
            with contextlib.chdir(at) if at.is_dir() else contextlib.nullcontext():
                module = import_source(name, path)
                # A file that changes the working directory does so in its first import alone.
                with contextlib.chdir(DIRECTORIES.setdefault((str(path or name), at), Path.cwd())):
                    yield module
        except FileNotFoundError as error:
            if at.is_dir() or not isinstance(error.filename, str) or Path(error.filename).is_absolute():
                raise
            where = f"{error.filename!r}, relative to the directory of the audit, {at}, which is missing"
            hint = f"build where this path exists, or correct `working_directory` in SOURCE in {file}"
            message = f"{path or name} opens {where}: {hint}"
            raise FileNotFoundError(message) from error


def locate(where: str, file: str, digest: str | None = None) -> Path:
    """Locate a file or folder of the user, relative to `file`.

    If the file has moved: the path without ".." in the nearest folder around `file`, or around the working directory.
    digest: SHA-256 of the audited file; a file with another digest is used with a warning.
    Raises: FileNotFoundError.
    """
    here = Path(file).resolve().parent
    names = [name for name in Path(where).parts if name != ".."]
    folders = [here, *here.parents, Path.cwd(), *Path.cwd().parents]
    places = dict.fromkeys((here / where, *(folder.joinpath(*names) for folder in folders)))
    existing = [path.resolve() for path in places if path.exists()]
    for path in existing:
        if digest is None or (path.is_file() and digest_of(path) == digest):
            return path
    if existing:
        warnings.warn(f"{existing[0]} differs from the audited file: audit again if the model changed", stacklevel=2)
        return existing[0]
    raise FileNotFoundError(
        f"cannot find {where}, neither relative to {file} nor in a parent folder of that file or of the working "
        f"directory: audit the model again, or correct the path in SOURCE in {file}"
    )
