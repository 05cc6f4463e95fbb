"""The ledger: dtypes of all parameters, buffers and operations at each stage, and casts that nobody asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import FileField


@dataclass(frozen=True)
class LedgerRow:
    """The dtypes of one parameter, buffer or operation, by torch's names."""

    name: Annotated[str, FileField("name in the state dict, or of the operation in the captured graph")]
    kind: Annotated[str, FileField("kind of this row", choices=("parameter", "buffer", "operation"))]
    loaded: Annotated[str, FileField("dtype as loaded; of an operation: of its result in the recorded run")]
    checkpoint: Annotated[str | None, FileField("dtype in the checkpoint; `null`: no checkpoint was read")] = None
    author: Annotated[str | None, FileField("dtype that the author's code or lists request; `null`: none")] = None
    planned: Annotated[str | None, FileField("dtype under the plan, by module; `null`: no plan")] = None
    executed: Annotated[str | None, FileField("dtype in which operations read or compute; `null`: unused")] = None
    module: Annotated[str, FileField("module that contains the operation, or that owns the weight")] = ""
    op: Annotated[str, FileField("ATen overload of an operation")] = ""
    source: Annotated[str | None, FileField("source line of an operation; `null`: unknown")] = None


@dataclass(frozen=True)
class Loss:
    """How a cast to fewer bits changes a tensor. error: relative L2; changed: share of changed values; zeros: share of
    non-zero values that become zero; infinite: number of finite values that become infinite or NaN."""

    error: float
    changed: float
    zeros: float = 0.0
    infinite: int = 0


@dataclass(frozen=True)
class SilentCast:
    """A cast to fewer bits that the user did not request. kind: a key of rulebook.findings.SILENT.

    names: parameters and buffers; for an operation, modules. before, after: dtypes by torch's names; loss: None if the
    values before the cast are unknown. source: line of a cast on loading; None: unknown. node: the operation, if any.
    """

    kind: str
    names: tuple[str, ...]
    before: str
    after: str
    loss: Loss | None = None
    source: str | None = None
    node: str = ""
