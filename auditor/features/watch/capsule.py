"""Capsules: one training step as files that load with `weights_only=True`, a whole one or none."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import LoadError
from ...records.written import plain, revive
from .encoding import decode, encode

VERSION = 1
"""Version of the format."""
ABOUT, STATE = "capsule.json", "state.pt"
DRAFT = ".auditor-capsule-"
"""Prefix of the folder into which a capsule is written before it gets its name."""


@dataclass(frozen=True)
class Code:
    """Where the user's step is written. text: of the file, to tell whether it has changed since."""

    file: str
    name: str
    line: int
    digest: str

    @property
    def target(self) -> str:
        """The step as a TARGET of the command line; "" for a step that cannot be imported."""
        is_local = "<" in self.name or not self.file
        return "" if is_local else f"{self.file}:{self.name}"


@dataclass(frozen=True)
class About:
    """What capsule.json says of a step.

    kind, text: of the trigger. step: number of the user's step, from 0. rank, world: of the process, and the number of
    processes. order: number of the recorder in its process. updated: numbers of the optimizers that had updated their weights before the trigger, in this step.
    scalers: state of each GradScaler. groups: for each optimizer its parameter groups, without parameters. autocast:
    {device: dtype} of the regions around the model. is_whole_step: whether the batches are arguments of the user's
    step, not of the model. evaluated: paths of modules in evaluation mode. trained: names of parameters that require
    gradients. changed: numbers of the calls whose batch was written to after they began. sharded: names of weights of
    which this rank has a part. signals: of the last steps. update: the user's line that called the optimizer.
    """

    kind: str
    text: str
    step: int
    rank: int = 0
    world: int = 1
    order: int = 0
    updated: tuple[int, ...] = ()
    scale: float | None = None
    loss: float | None = None
    norm: float | None = None
    scalers: tuple[Mapping[str, Any], ...] = ()
    optimizers: tuple[str, ...] = ()
    groups: tuple[Any, ...] = ()
    autocast: Mapping[str, str] = field(default_factory=dict)
    is_whole_step: bool = True
    is_training: bool = True
    evaluated: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    changed: tuple[int, ...] = ()
    sharded: tuple[str, ...] = ()
    code: Code | None = None
    update: str = ""
    error: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    signals: tuple[Mapping[str, Any], ...] = ()
    format_version: int = VERSION


@dataclass(frozen=True)
class Call:
    """One call of the user's step, or of the model. batch: its arguments, (args, kwargs). generators: states at its
    start. draws: random numbers of the model, in order, if they were recorded. variables: {name: number} at its start, see
    `Variables`."""

    batch: Any
    generators: Mapping[str, Any]
    draws: tuple[Any, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Capsule:
    """A training step before its update. weights, buffers: by name, on the CPU; buffers as before the first call.
    frozen: {name: (file, SHA-256)} of weights that are not saved. states: of the optimizers, None where not saved.
    calls: of the step since the last update. previous: batches of earlier steps, the last one last. beside: {variable:
    {name: value}} of other modules that the step reads, such as a criterion or a teacher. others: {optimizer.parameter:
    value} of parameters of the optimizers, by their numbers, that belong to none of these modules."""

    about: About
    weights: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    frozen: Mapping[str, tuple[str, str]]
    states: tuple[Any, ...]
    calls: tuple[Call, ...]
    previous: tuple[Any, ...] = ()
    beside: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)


def write(capsule: Capsule, folder: Path, name: str) -> Path:
    """Write a capsule into a new folder inside `folder`, which appears with all its files or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{DRAFT}{os.getpid()}-", dir=folder))
    try:
        state = {
            "weights": dict(capsule.weights),
            "buffers": dict(capsule.buffers),
            "frozen": {key: list(value) for key, value in capsule.frozen.items()},
            "states": encode(list(capsule.states)),
            "calls": [
                {
                    "batch": encode(one.batch),
                    "generators": encode(dict(one.generators)),
                    "draws": encode(one.draws),
                    "variables": encode(dict(one.variables)),
                }
                for one in capsule.calls
            ],
            "previous": encode(list(capsule.previous)),
            "beside": {name: dict(values) for name, values in capsule.beside.items()},
            "others": dict(capsule.others),
        }
        with (draft / STATE).open("wb") as file:
            torch.save(state, file)
            _flush(file)
        with (draft / ABOUT).open("w", encoding="utf-8") as file:
            json.dump(plain_exactly(asdict(capsule.about)), file, indent=1)
            file.write("\n")
            _flush(file)
        draft.chmod(0o755)
        target = _unused(folder / name)
        draft.rename(target)
        return target
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def remove_drafts(folder: Path) -> None:
    """Remove what processes that no longer run have left of capsules that they did not finish."""
    for draft in folder.glob(f"{DRAFT}*-*"):
        number = draft.name.removeprefix(DRAFT).partition("-")[0]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(draft, ignore_errors=True)


def read_about(folder: Path) -> About:
    """What capsule.json says. Raises: LoadError(slug="bad-capsule")."""
    if not (folder / ABOUT).is_file() or not (folder / STATE).is_file():
        said = f"{folder} is no capsule: give a folder that auditor.watch wrote, with {ABOUT} and {STATE}"
        raise LoadError(said, "bad-capsule")
    try:
        about = _about(json.loads((folder / ABOUT).read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = f"{folder / ABOUT} cannot be read ({' '.join(str(error).split())[:100]})"
        raise LoadError(f"{said}: copy the whole capsule again", "bad-capsule") from error
    if about.format_version > VERSION:
        said = f"{folder} was written by a newer release of the auditor: use that release to replay it"
        raise LoadError(said, "bad-capsule")
    return about


def read(folder: Path) -> Capsule:
    """Read a capsule. Types of the user's code are made of their modules, if these are imported.

    Raises: LoadError(slug="bad-capsule").
    """
    about = read_about(folder)
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        script = Path(about.command[0]).name if about.command else ""
        decoded = partial(decode, script=script)
        calls = [_call(one, decoded) for one in state["calls"]]
        return Capsule(
            about=about,
            weights=state["weights"],
            buffers=state["buffers"],
            frozen={name: (file, digest) for name, (file, digest) in state["frozen"].items()},
            states=tuple(decoded(state["states"])),
            calls=tuple(calls),
            previous=tuple(decoded(state["previous"])),
            beside=state.get("beside", {}),
            others=state.get("others", {}),
        )
    except Exception as error:
        said = f"{folder / STATE} cannot be read ({type(error).__name__}): copy the whole capsule again"
        raise LoadError(said, "bad-capsule") from error


def _call(data: Mapping[str, Any], decoded: Callable[[Any], Any]) -> Call:
    return Call(
        batch=decoded(data["batch"]),
        generators=decoded(data["generators"]),
        draws=tuple(decoded(data["draws"])),
        variables=decoded(data.get("variables", {})),
    )


def _about(data: Mapping[str, Any]) -> About:
    data = revive(dict(data))
    names = {one.name for one in dataclasses.fields(About)}
    known: dict[str, Any] = {}
    for name, value in data.items():
        if name in names:
            known[name] = tuple(value) if isinstance(value, list) else value
    known["code"] = Code(**known["code"]) if known.get("code") else None
    return About(**known)


def plain_exactly(value: Any) -> Any:
    """JSON data of a record, with all digits of its numbers, and with Inf and NaN as text."""
    if isinstance(value, float):
        text = plain(value)
        return text if isinstance(text, str) else value
    if isinstance(value, Mapping):
        return {str(key): plain_exactly(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_exactly(item) for item in value]
    return plain(value)


def digest_of(x: torch.Tensor) -> str:
    """The SHA-256 of a tensor's entries, of any dtype."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _unused(target: Path) -> Path:
    number = 1
    path = target
    while path.exists():
        number += 1
        path = target.with_name(f"{target.name}-{number}")
    return path
