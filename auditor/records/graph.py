"""What is audited, and the graph that was recorded of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from .written import FileField, Unwritten, empty

if TYPE_CHECKING:
    import torch
    from torch import nn


Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call of the model."""

Progress = Callable[[str, str, int, int], None]
"""Called as progress(stage, detail, done, total); total is 0 where it is not known."""


@dataclass(frozen=True)
class Origin:
    """How the model was made, so that `patched_model.py` can make it again. `kind`: factory | instance | class | spec.

    path: of its file; None for an installed module, and for one of a hub. module: the name that its classes carry. folder:
    a directory that the symbol is called with, ahead of `init_args`. digest: SHA-256 of the file.
    """

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


@dataclass(frozen=True)
class Objective:
    """What a training step minimises. loss_fn(outputs, *targets) -> scalar; None: the model returns its own loss.

    targets: positional and keyword arguments of `loss_fn` after the outputs, one pair per batch. source: where the loss
    came from, in words.
    """

    loss_fn: Callable[..., Any] | None
    targets: tuple[Batch, ...]
    source: str


@dataclass(frozen=True)
class Subject:
    """A model, the inputs it is audited on, and where both came from.

    raised: which of what it stores in FP16 or BF16 is held in FP32 while it is audited, see Plan.raised; the
    batches hold no half then. stored_low: {dtype: how many numbers of its parameters are stored in it}. flags: how
    torch is set to compute once its file is imported, where it has one. given: the caller's own, where this is a copy on another device.
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
    raised: str = "none"
    stored_low: Mapping[str, int] = empty()
    flags: Mapping[str, Any] = empty()
    given: Subject | None = None


@dataclass(frozen=True)
class Call:
    """One call of a module, or of a function of torch. path: its first name, or the function's; depth: how many calls of
    modules enclose it; key: differs from call to call.

    handed: whether it was given a dtype among its arguments, so that what it casts to is its caller's to say.
    """

    path: str
    depth: int
    key: str
    handed: bool = False


@dataclass(frozen=True)
class AutocastRegion:
    """A region of autocast that the author put an operation in. depth: how many module calls were open where it begins."""

    enabled: bool
    dtype: str
    depth: int


@dataclass(frozen=True)
class Literals:
    """What Python writes at one operation once the model is low.

    arguments: {position or name: value} of those that differ. result: the dtype of a cast that follows the operation
    then; dtypes that torch has not are rows of the table of formats.
    """

    arguments: Mapping[int | str, Any] = empty()
    result: Any = None


CalledFrom = Annotated[
    str | None, FileField("`file:line in function` that called it: a `forward`, your own line, a loss; `null`: none")
]


@dataclass(frozen=True)
class Node:
    """One operation of the graph in the user's own terms.

    calls: the module calls that enclose it, the root's first. returned: keys of those that hand it to their callers, and not
    by an attribute. region: the author's own, if it lies in one. in_place: so the author wrote it: autocast leaves it alone,
    and its result has the dtype of what it writes to. function: the call of a function of torch that it is part of, which a
    scope may keep in FP32. literals: {format: what differs when the model is stored in it}; autocast_literals: under autocast.
    """

    name: Annotated[str, FileField("in the captured graph")]
    op: Annotated[str, FileField("ATen overload, for example `aten.softmax.int`")]
    owner: Annotated[str, FileField("module it belongs to")]
    owner_type: Annotated[str, FileField("class of that module")]
    source: Annotated[str | None, FileField("line that wrote it, outside of torch; `null`: none was on the way")]
    source_path: Annotated[str | None, FileField("the file of `source`, from its repository or from `site-packages`")]
    code: Annotated[str | None, FileField("what stands there")]
    inputs: Annotated[tuple[str, ...], FileField("names of the nodes that it reads")]
    shape: Annotated[tuple[int, ...], FileField("of its result, of the first of several")]
    dtype: Annotated[str, FileField("of the same, in FP32")]
    floating: Annotated[bool, FileField("whether that is floating")]
    calls: Unwritten[tuple[Call, ...]] = ()
    returned: Unwritten[tuple[str, ...]] = ()
    region: Unwritten[AutocastRegion | None] = None
    in_place: Unwritten[bool] = False
    function: Unwritten[Call | None] = None
    literals: Unwritten[Mapping[str, Literals]] = field(default_factory=dict)
    autocast_literals: Unwritten[Mapping[str, Literals]] = field(default_factory=dict)
    called_from: CalledFrom = None
    caller_path: Annotated[str | None, FileField("the file of `called_from`")] = None
    column: Annotated[int | None, FileField("where in that of `source` it begins; `null`: not known", least=1)] = None
    caller_column: Annotated[int | None, FileField("the same of `called_from`", least=1)] = None
    batch: Annotated[int, FileField("number of the batch whose run it was recorded in", least=1)] = 1


@dataclass(frozen=True)
class Placeholder:
    """An input of the graph. kind: parameter | buffer | constant | input; fqn: state-dict name where it has one.

    holders: modules whose parameter or buffer it is, each under its first path, whether they are called or not.
    made_in: {format: dtype in which Python makes this constant when the model is stored in the format}, where it differs.
    argument: of an input, what the forward calls it.
    """

    name: str
    kind: str
    fqn: str | None
    made_in: Mapping[str, torch.dtype] = empty()
    holders: tuple[str, ...] = ()
    argument: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several modules hold it."""
        return len(self.holders) > 1


@dataclass(frozen=True)
class Capture:
    """One torch.fx graph of ATen operations. `bind(model, batch)` gives the flat list of tensors the graph takes.

    method: "run" (one recorded run, as good for other inputs of these shapes) or "path" (Python read values in it: it holds
    for inputs that take the same path). same_path: what tells the other batches that do, see recording/paths.py.
    nodes: {name: operation}, in execution order. outputs: names of the nodes the model returns, in flattened order.
    operations: how many the run took, those that no output depends on too.
    compared: whether the run was held against low ones, to find literals that Python derives from a dtype.
    aliases: {first path of a module: its other paths}.
    paths: every path through the model that is in the graph, where the batches take several; `bind`, and the shapes of what
    several paths run, are those of the first. twins: {operation or input of a later path: the same one of an earlier path}.
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
        """The path of the first batch alone."""
        return self.paths[0].capture if self.paths else self


@dataclass(frozen=True)
class ModelPath:
    """One path through a model. capture: its own graph, with the names of the whole; batches: those that take it, the one
    that was recorded first; outputs: names of what the model returns on it."""

    capture: Capture
    batches: tuple[Batch, ...]
    outputs: tuple[str, ...] = ()
