"""The audited model, and its recorded graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from .ledger import LedgerRow, SilentCast
from .written import FileField, Unwritten, empty

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""(positional arguments, keyword arguments) of one call of the model."""

Progress = Callable[[str, str, int, int], None]
"""A progress callback, called as progress(stage, detail, done, total); total is 0 if unknown."""


@dataclass(frozen=True)
class Origin:
    """How `patched_model.py` builds the model. kind: factory | instance | class | spec | program
    (an exported program, which the symbol loads).

    path: the model's file; None for an installed module or a hub model. module: `__module__` of its classes. folder: a
    directory that is passed to the symbol before `init_args`. digest: SHA-256 of the file. words: arguments for the
    script. method: the method that the audit calls instead of `forward`."""

    path: str | None
    module: str | None
    symbol: str
    kind: str
    init_args: tuple[Any, ...] = ()
    init_kwargs: Mapping[str, Any] = empty()
    weights: str | None = None
    folder: str | None = None
    digest: str | None = None
    working_directory: str | None = None
    words: tuple[str, ...] = ()
    method: str = ""


@dataclass(frozen=True)
class Objective:
    """The loss of a training step. loss_fn(outputs, *targets) -> scalar; None: the model returns its own loss.

    targets: positional and keyword arguments of `loss_fn` after the outputs, one pair per batch. source: origin of the
    loss, in words.
    """

    loss_fn: Callable[..., Any] | None
    targets: tuple[Batch, ...]
    source: str


@dataclass(frozen=True)
class Subject:
    """A model and its inputs, with the origins of model and inputs.

    upcast: which of the model's FP16 or BF16 tensors become FP32 for the audit, see Plan.upcast; the batches then
    contain no half precision. stored_low: {dtype: number of parameter entries stored in it}. flags: torch's flags after
    importing the model's file, if any. given: the caller's subject, if this subject is a copy on another device.
    stored: dtypes of the model's tensors as loaded. casts: casts to fewer bits while loading.
    """

    model: nn.Module
    batches: tuple[Batch, ...]
    name: str
    target: str
    inputs_source: str
    weights_source: str
    held_out: tuple[Batch, ...] = ()
    origin: Origin | None = None
    synthetic_inputs: bool = False
    random_weights: bool = False
    warnings: tuple[str, ...] = ()
    objective: Objective | None = None
    upcast: str = "none"
    stored_low: Mapping[str, int] = empty()
    flags: Mapping[str, Any] = empty()
    given: Subject | None = None
    stored: tuple[LedgerRow, ...] = ()
    casts: tuple[SilentCast, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of a module or torch function. path: the module's first path, or the function's name; depth: number of
    enclosing module calls; key: a number unique to the call.

    handed: whether a dtype is among the arguments, so that casts in the call follow the caller's choice.
    """

    path: str
    depth: int
    key: str
    handed: bool = False


@dataclass(frozen=True)
class AutocastRegion:
    """An autocast region in the user's code. depth: number of module calls that enclose the region's beginning."""

    enabled: bool
    dtype: str
    depth: int


@dataclass(frozen=True)
class Literals:
    """The constants of one operation that differ if the model runs in low precision.

    arguments: {position or name: value} for the arguments that differ. result: dtype of a cast after the operation, if
    any; for a dtype that torch lacks, a row of the table of formats.
    """

    arguments: Mapping[int | str, Any] = empty()
    result: Any = None


class Span(NamedTuple):
    """The text of one expression in a file: lines from 1, columns in UTF-8 bytes from 0, as in `ast`."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int


CalledFrom = Annotated[
    str | None,
    FileField(
        "the call that reached `source`, as `file:line in function`, in your code or a `forward`; `null`: no such call"
    ),
]


@dataclass(frozen=True)
class Node:
    """One operation of the captured graph, with its module and source line.

    calls: enclosing module calls, the root's first. returned: `Call.key` of each module call that returns the result.
    region: the user's autocast region around the operation. in_place: whether the operation writes in place; autocast
    then casts neither inputs nor result. torch_module: whether torch defines `forward` of the module, as of Linear. function: the torch function call around the node, which a scope may keep in
    FP32. literals: {format: constants that differ from FP32's if the model is stored in the format};
    autocast_literals: the same under autocast. expressions: the user's expressions around the operation, from that of
    the innermost function to that of the outermost. steers: whether Python read a value that depends on the result, or
    a shape does, so that rounding may lead to another branch.
    """

    name: Annotated[str, FileField("name of the operation in the captured graph")]
    op: Annotated[str, FileField("ATen overload, for example `aten.softmax.int`")]
    owner: Annotated[str, FileField("module that contains the operation")]
    owner_type: Annotated[str, FileField("class of that module")]
    source: Annotated[str | None, FileField("source line outside of torch, as `file:line`; `null`: unknown")]
    source_path: Annotated[str | None, FileField("the file of `source`, relative to its repository or `site-packages`")]
    code: Annotated[str | None, FileField("text of the source line")]
    inputs: Annotated[tuple[str, ...], FileField("names of the operations, inputs and weights that it reads")]
    shape: Annotated[tuple[int, ...], FileField("shape of the operation's first result")]
    dtype: Annotated[str, FileField("dtype of the operation's first result in the FP32 model")]
    floating: Annotated[bool, FileField("whether the operation's first result is floating-point")]
    calls: Unwritten[tuple[Call, ...]] = ()
    returned: Unwritten[tuple[str, ...]] = ()
    region: Unwritten[AutocastRegion | None] = None
    in_place: Unwritten[bool] = False
    torch_module: Unwritten[bool] = False
    function: Unwritten[Call | None] = None
    literals: Unwritten[Mapping[str, Literals]] = field(default_factory=dict)
    autocast_literals: Unwritten[Mapping[str, Literals]] = field(default_factory=dict)
    called_from: CalledFrom = None
    caller_path: Annotated[str | None, FileField("the path of the file in `called_from`")] = None
    column: Annotated[int | None, FileField("column in the source line; `null`: unknown", least=1)] = None
    caller_column: Annotated[int | None, FileField("column in `called_from`'s line; `null`: unknown", least=1)] = None
    batch: Annotated[int, FileField("number of the batch whose run recorded this operation", least=1)] = 1
    expressions: Unwritten[tuple[Span, ...]] = ()
    steers: Unwritten[bool] = False


@dataclass(frozen=True)
class Made:
    """Where the user's code made a tensor that no recorded operation made, for example with NumPy.

    name: its variable or attribute, "" if unknown. source: line as `file:line`, or None. kind: local | global | attribute
    (of a module) | container (in a list or dict that is an attribute of a module); unnamed tensors are local.
    """

    name: str
    source: str | None
    kind: str = "local"


@dataclass(frozen=True)
class Placeholder:
    """An input of the graph. kind: parameter | buffer | constant | input; fqn: dotted name of the parameter or buffer.

    holders: first paths of all modules that own the parameter or buffer, called or not. made_in: {format: dtype of this
    constant if the model is stored in the format}, if it differs. argument: name of an input in `forward`. made: where a constant was made, if known.
    """

    name: str
    kind: str
    fqn: str | None
    made_in: Mapping[str, torch.dtype] = empty()
    holders: tuple[str, ...] = ()
    argument: str | None = None
    made: Made | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several modules own the parameter or buffer."""
        return len(self.holders) > 1


@dataclass(frozen=True)
class Capture:
    """A recorded forward pass: a torch.fx graph of ATen operations. `bind(model, batch)` lists the graph's inputs.

    method: inputs for which the graph is valid. "run": all inputs of the recorded shapes; "path": only inputs for which
    Python code takes the same branches, since it read tensor values. same_path: keys of batches on this path, see
    capture/paths.py. nodes: {name: operation}, in execution order. outputs: names of the nodes that the model returns.
    operations: number of operations run, including operations that no output depends on. compared: whether the run was
    compared with low-precision runs, to detect constants that depend on a dtype. aliases: {first name of a shared
    module: its other names}. paths: every recorded path, if batches take several; `bind` and the shapes of shared nodes
    are the first path's. twins: {operation or input of a later path: the equal one of an earlier path}.
    """

    graph_module: torch.fx.GraphModule
    nodes: Mapping[str, Node]
    placeholders: tuple[Placeholder, ...]
    outputs: tuple[str, ...]
    bind: Callable[[nn.Module, Batch], list[Any]]
    method: str
    operations: int = 0
    compared: bool = False
    aliases: Mapping[str, tuple[str, ...]] = empty()
    same_path: frozenset[tuple[int, ...]] = frozenset()
    warnings: tuple[str, ...] = ()
    paths: tuple[ModelPath, ...] = ()
    twins: Mapping[str, str] = empty()

    @property
    def first(self) -> Capture:
        """The capture of the first batch's path."""
        return self.paths[0].capture if self.paths else self


@dataclass(frozen=True)
class ModelPath:
    """One path through a model. capture: its graph, with the joined graph's node names; batches: those that take it,
    the recorded one first; outputs: names of the returned tensors; repeated: the returned tensors of the recorded
    batch, if a run with gradients returned equal ones."""

    capture: Capture
    batches: tuple[Batch, ...]
    outputs: tuple[str, ...] = ()
    repeated: list[torch.Tensor] | None = field(default=None, repr=False, compare=False)
