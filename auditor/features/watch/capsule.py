"""Capsules: one training step as files that load with `weights_only=True`, a whole one or none."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import LoadError
from ...records.written import plain, revive

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
    processes. updated: numbers of the optimizers that had updated their weights before the trigger, in this step.
    scalers: state of each GradScaler. groups: for each optimizer its parameter groups, without parameters. autocast:
    {device: dtype} of the regions around the model. is_whole_step: whether the batches are arguments of the user's
    step, not of the model. evaluated: paths of modules in evaluation mode. trained: names of parameters that require
    gradients. changed: entries of the batch that were written after the step began. sharded: names of weights of
    which this rank has a part. signals: of the last steps. update: the user's line that called the optimizer.
    """

    kind: str
    text: str
    step: int
    rank: int = 0
    world: int = 1
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
    calls: of the step since the last update. previous: batches of earlier steps, the last one last."""

    about: About
    weights: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    frozen: Mapping[str, tuple[str, str]]
    states: tuple[Any, ...]
    calls: tuple[Call, ...]
    previous: tuple[Any, ...] = ()


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
                    "variables": dict(one.variables),
                }
                for one in capsule.calls
            ],
            "previous": encode(list(capsule.previous)),
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
        return Capsule(
            about,
            state["weights"],
            state["buffers"],
            {name: (file, digest) for name, (file, digest) in state["frozen"].items()},
            tuple(decode(state["states"])),
            tuple(
                Call(
                    decode(one["batch"]),
                    decode(one["generators"]),
                    tuple(decode(one["draws"])),
                    one.get("variables", {}),
                )
                for one in state["calls"]
            ),
            tuple(decode(state["previous"])),
        )
    except Exception as error:
        said = f"{folder / STATE} cannot be read ({type(error).__name__}): copy the whole capsule again"
        raise LoadError(said, "bad-capsule") from error


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


# What a file may contain that loads with `weights_only=True`: tensors, numbers, texts, lists and dicts. Other values
# become a dict with the key _KIND.

_KIND = "__auditor__"
_PLAIN = (bool, int, float, str, bytes, complex, type(None))


def encode(value: Any) -> Any:
    """Convert a batch, or another value, to one that `torch.load(weights_only=True)` accepts; tensors go to the CPU.

    What cannot be converted becomes its `repr`, see `decode`.
    """
    if isinstance(value, torch.Tensor):
        return _host(value)
    if type(value) in _PLAIN or isinstance(value, torch.dtype):
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {_KIND: "tuple", "items": [encode(item) for item in value]}
    kind = {"module": type(value).__module__, "name": type(value).__qualname__}
    if isinstance(value, tuple):
        return {_KIND: "named", **kind, "items": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        pairs = [[encode(key), encode(item)] for key, item in value.items()]
        return {_KIND: "mapping", **kind, "pairs": pairs}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return _encode_numpy(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [[one.name, encode(getattr(value, one.name))] for one in dataclasses.fields(value)]
        return {_KIND: "dataclass", **kind, "pairs": pairs}
    if isinstance(value, torch.device):
        return {_KIND: "device", "text": str(value)}
    if isinstance(value, (set, frozenset)):
        return {_KIND: "set", "items": [encode(item) for item in value]}
    if isinstance(value, (int, float, str)):  # subclasses, such as enums
        return next(base(value) for base in (int, float, str) if isinstance(value, base))
    members = _members(value)
    if members is not None:
        return {_KIND: "object", **kind, "pairs": [[name, encode(item)] for name, item in members.items()]}
    return {_KIND: "unknown", **kind, "text": repr(value)[:200]}


def _members(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object that holds tensors, such as a batch of graphs; None for another object."""
    members = getattr(value, "__dict__", None)
    if callable(value) or not isinstance(members, dict):
        return None
    return members if any(isinstance(x, torch.Tensor | Mapping | list) for x in members.values()) else None


def _encode_numpy(value: Any) -> Any:
    try:
        return {_KIND: "numpy", "array": torch.from_numpy(value.copy()), "scalar": False}
    except (TypeError, AttributeError):
        return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value.tolist()


def _host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU as a plain tensor: of a sharded one this rank's part, and never a view of a larger storage."""
    x = local(x).detach()
    if type(x) is not torch.Tensor:
        x = x.as_subclass(torch.Tensor)
    return x.cpu().clone() if x.layout is torch.strided else x.cpu()


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, without communication; another tensor as it is."""
    to_local = getattr(x, "to_local", None)
    return to_local() if callable(to_local) else x


def decode(value: Any) -> Any:
    """The inverse of `encode`. Types of the user become themselves if their modules are imported, else dicts and tuples;
    a value that was not saved becomes a `NotSaved`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case "tuple":
            return tuple(decode(item) for item in value["items"])
        case "set":
            return {decode(item) for item in value["items"]}
        case "named":
            items = [decode(item) for item in value["items"]]
            return _made(value, lambda kind: _named(kind, items), tuple(items))
        case "mapping":
            pairs = {decode(key): decode(item) for key, item in value["pairs"]}
            return _made(value, lambda kind: kind(pairs) if issubclass(kind, Mapping) else pairs, pairs)
        case "dataclass" | "object":
            members = {name: decode(item) for name, item in value["pairs"]}
            return _made(value, lambda kind: _with_members(kind, members), members)
        case "numpy":
            return value["array"].numpy()
        case "device":
            return torch.device("cpu")
        case "unknown":
            return NotSaved(value["text"])
    return value


@dataclass(frozen=True)
class NotSaved:
    """Stands for a value of a batch that a capsule cannot contain."""

    text: str


def _made(value: Mapping[str, Any], make: Callable[[Any], Any], otherwise: Any) -> Any:
    """An object of the type that a value was encoded from, if the user's code has imported it."""
    kind: Any = sys.modules.get(value["module"])
    for name in value["name"].split("."):
        kind = getattr(kind, name, None)
    if not isinstance(kind, type):
        return otherwise
    try:
        return make(kind)
    except Exception:
        return otherwise


def _named(kind: type[Any], items: list[Any]) -> Any:
    """A named tuple, or another subclass of tuple, such as `torch.Size`."""
    if not issubclass(kind, tuple):
        return tuple(items)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _with_members(kind: type[Any], members: Mapping[str, Any]) -> Any:
    made = object.__new__(kind)
    for name, item in members.items():
        object.__setattr__(made, name, item)
    return made


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
