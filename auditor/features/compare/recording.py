"""The recording of a run: one row for each value, without tensors; and its JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import AuditorError
from .fingerprint import Fingerprint, total

KIND = "recording of a run"
"""The value of the key `kind` in a recording's file."""
VERSION = 1
PRINTS_INSIDE = 3
"""Maximum number of fingerprints inside operations for each value of a recording, on average."""
OWN_GRADIENT, OWN_GRADIENT_STORED, OWN_GRADIENT_LOW = 1e-4, 1e-3, 0.1
"""Tolerances of gradients of the model's own backward pass: in FP64, in FP32, and of runs with low precision."""
STORED = ("parameter", "buffer", "constant")
"""Kinds of values that are not computed in the run."""


@dataclass(frozen=True)
class Value:
    """One value of a run: the result of an operation, or an input, parameter, buffer or constant.

    kind: "operation", "input", "parameter", "buffer" or "constant"; "decision" for indices and masks on which shapes
    depend, which replays take from the run. op: ATen overload, or the kind. owner: path of the
    module, or the dotted name of a parameter or buffer. source, code: source line of the operation. called_from: the
    user's call that reached the line. literals: {argument: value} of arguments that are no tensors. dtype: in the run.

    prints: fingerprints of the result's tensors, computed in FP64. live: the same over entries with a derivative.
    inner: fingerprints inside an operation that other implementations write out, such as a norm. error: relative L2
    difference between the run and FP64, with the run's decisions. flips: share of entries in which a discrete result
    differs from FP64's. slack, order_slack: how far the sums, and the projection by order, may move if stored tensors are
    rounded differently. gradients: fingerprints of the derivative of a projection of all outputs. wide: whether FP64 has a
    kernel for the operation. trainable: whether a parameter requires gradients. own_gradient: whether the gradient is
    that of the model's own backward pass, since the recorded operations have another. fits: the low dtype that has all
    entries of an FP32 parameter, "" if there is none.
    """

    name: str
    kind: str
    op: str
    owner: str
    inputs: tuple[str, ...]
    dtype: str
    prints: tuple[Fingerprint, ...]
    live: tuple[Fingerprint | None, ...] = ()
    inner: tuple[Fingerprint, ...] = ()
    gradients: tuple[Fingerprint | None, ...] = ()
    source: str | None = None
    code: str | None = None
    called_from: str | None = None
    literals: Mapping[str, str] = field(default_factory=dict)
    error: float = 0.0
    flips: float = 0.0
    slack: float = 0.0
    order_slack: float = 0.0
    wide: bool = True
    trainable: bool = False
    own_gradient: bool = False
    fits: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether the value is a parameter, buffer or constant."""
        return self.kind in STORED

    @property
    def is_float(self) -> bool:
        """Whether the entries are floating-point or complex numbers."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def packet(self) -> str:
        """The operation without namespace and overload, such as `softmax`."""
        return self.op.split(".")[1] if "." in self.op else self.op

    def __add__(self, other: Value) -> Value:
        """The value over two batches; stored values are the same in both."""
        if self.is_stored:
            return self
        return replace(
            self,
            prints=tuple(x + y for x, y in zip(self.prints, other.prints, strict=True)),
            live=_added(self.live, other.live),
            inner=tuple(x + y for x, y in zip(self.inner, other.inner, strict=False)),
            gradients=_added(self.gradients, other.gradients),
            error=max(self.error, other.error),
            flips=max(self.flips, other.flips),
            slack=max(self.slack, other.slack),
            order_slack=max(self.order_slack, other.order_slack),
        )


def _added(
    ours: tuple[Fingerprint | None, ...], theirs: tuple[Fingerprint | None, ...]
) -> tuple[Fingerprint | None, ...]:
    """Sums of two values' live entries or gradients; () if one of the two has none."""
    if len(ours) != len(theirs):
        return ()
    pairs = zip(ours, theirs, strict=True)
    return tuple(None if x is None or y is None else total((x, y)) for x, y in pairs)


@dataclass(frozen=True)
class Output:
    """One output. value: name of its value. wide, run: sketches of the output in FP64 and in the run."""

    name: str
    value: str
    wide: tuple[float, ...]
    run: tuple[float, ...]


@dataclass(frozen=True)
class Recording:
    """A run of a model on its inputs, without tensors.

    values: {name: Value}, in execution order. inputs: names of the values that are inputs. batches: how many batches
    the sums are over. not_compared: what a comparison cannot cover, in sentences. own_backwards: autograd functions of
    the model with a backward of their own, each with its source line. environment: {name: version or setting}.
    """

    target: str
    environment: Mapping[str, str]
    values: dict[str, Value]
    outputs: tuple[Output, ...]
    batches: int = 1
    not_compared: tuple[str, ...] = ()
    own_backwards: tuple[str, ...] = ()

    @property
    def own_tolerance(self) -> float:
        """Relative difference up to which a gradient of the model's own backward pass equals that of its operations.

        The model's code may cast to FP32, or to a low precision, which rounds in its own backward pass alone.
        """
        is_low = any(value.dtype in ("float16", "bfloat16") for value in self.values.values())
        return OWN_GRADIENT_LOW if is_low else OWN_GRADIENT_STORED

    @property
    def inputs(self) -> list[Value]:
        """The values that were given to the model."""
        return [value for value in self.values.values() if value.kind == "input"]


def limit_inner(values: dict[str, Value]) -> dict[str, Value]:
    """The values with so few fingerprints inside operations that the file stays below 1 kB for each value.

    Operations with the most, such as recurrent layers, keep their first ones, which are of their first steps.
    """
    left = PRINTS_INSIDE * len(values)
    counts = sorted(len(value.inner) for value in values.values())
    most = counts[-1] if counts else 0
    for index, count in enumerate(counts):
        share = left // (len(counts) - index)
        if count > share:
            most = share
            break
        left -= count
    return {name: replace(value, inner=value.inner[:most]) for name, value in values.items()}


def to_json(recording: Recording) -> str:
    """The recording as the text of a JSON file, without whitespace; defaults are left out."""
    places: dict[tuple[Any, ...], int] = {}
    rows = [_row_of(value, places) for value in recording.values.values()]
    data = {
        "kind": KIND,
        "version": VERSION,
        "target": recording.target,
        "environment": dict(recording.environment),
        "batches": recording.batches,
        "not_compared": list(recording.not_compared),
        "own_backwards": list(recording.own_backwards),
        "outputs": [asdict(output) for output in recording.outputs],
        "places": [list(place) for place in places],
        "values": rows,
    }
    return json.dumps(data, separators=(",", ":")) + "\n"


_PLACE = ("owner", "source", "code", "called_from")
_PRINTS = ("prints", "live", "inner", "gradients")
_DEFAULTS: dict[str, Any] = {
    "error": 0.0,
    "flips": 0.0,
    "slack": 0.0,
    "order_slack": 0.0,
    "wide": True,
    "trainable": False,
    "own_gradient": False,
    "fits": "",
}
_MEASURED = ("error", "flips", "slack", "order_slack")


def _row_of(value: Value, places: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    """A value as a JSON object. places: {owner, source, code, call: index}, which rows share."""
    row: dict[str, Any] = {name: getattr(value, name) for name in ("name", "kind", "op", "inputs", "dtype")}
    place = tuple(getattr(value, name) for name in _PLACE)
    row["place"] = places.setdefault(place, len(places))
    for name in _PRINTS:
        prints = getattr(value, name)
        if any(one is not None for one in prints):
            whole = name != "inner"  # these are compared without shapes and order
            row[name] = [None if one is None else one.to_list(whole) for one in prints]
    row |= {name: getattr(value, name) for name, default in _DEFAULTS.items() if getattr(value, name) != default}
    row |= {name: float(f"{row[name]:.4g}") for name in _MEASURED if name in row}
    if value.literals:
        row["literals"] = dict(value.literals)
    return row


def read(path: Path) -> Recording:
    """Read a recording's file. Raises: AuditorError(slug="bad-recording") for a file of another kind."""
    hint = "write one with `python -m auditor record TARGET --out FILE.json`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind = data.get("kind") if isinstance(data, dict) else None
    except OSError as error:
        raise AuditorError(f"cannot read {path} ({error.strerror}): check the path", "bad-recording") from error
    except ValueError as error:
        raise AuditorError(f"{path} is no JSON file ({error}): {hint}", "bad-recording") from error
    if kind != KIND:
        if isinstance(data, dict) and "plans" in data:
            message = f"{path} is an audit, not a recording of a run: `diff` compares audits; {hint}"
            raise AuditorError(message, "bad-recording")
        raise AuditorError(f"{path} is no recording of a run: {hint}", "bad-recording")
    if data["version"] != VERSION:
        message = f"{path} has version {data['version']} of the format, and this auditor reads {VERSION}: record again"
        raise AuditorError(message, "bad-recording")
    try:
        return _of_data(data)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise AuditorError(f"{path} is damaged ({error!r}): record again", "bad-recording") from error


def _of_data(data: dict[str, Any]) -> Recording:
    values = {}
    for row in data["values"]:
        place = dict(zip(_PLACE, data["places"][row.pop("place")], strict=True))
        for name in _PRINTS:
            if name in row:
                row[name] = tuple(None if one is None else Fingerprint.of_list(one) for one in row[name])
        row["inputs"] = tuple(row["inputs"])
        value = Value(**place, **row)
        if math.isnan(value.error):
            raise ValueError("an error is NaN")
        values[value.name] = value
    outputs = tuple(Output(o["name"], o["value"], tuple(o["wide"]), tuple(o["run"])) for o in data["outputs"])
    return Recording(
        data["target"],
        data["environment"],
        values,
        outputs,
        data["batches"],
        tuple(data["not_compared"]),
        tuple(data.get("own_backwards", ())),
    )
