"""Operations that receive tensors of two dtypes and raise, and where the wider tensors were made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ..capture.paths import reach
from ..numerics.nodes import row_of
from .policy import Policy
from .resolve import Resolution, is_low


@dataclass(frozen=True)
class Mixture:
    """Inputs of an operation that raises since their dtypes differ. wide: FP32 inputs; low: low-precision inputs.

    origins: operations and placeholders that made the FP32 values, in graph order. meetings: (operation, low-precision
    input) of the operations that promote on the way from the origins, in graph order. chain: the origins, the inputs, and
    all between. written: those of `origins` whose dtype the model's code decides: conversions, and new tensors.
    """

    wide: tuple[str, ...]
    low: tuple[str, ...]
    origins: tuple[str, ...]
    meetings: tuple[tuple[str, str], ...] = ()
    chain: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


def find_mixtures(policy: Policy, resolution: Resolution) -> dict[str, Mixture]:
    """{operation that raises since its inputs have two dtypes: the Mixture}, in graph order."""
    graph = policy.capture.graph_module.graph
    return {node.name: _mixture(policy, resolution, node) for node in graph.nodes if node.name in resolution.conflicts}


def _mixture(policy: Policy, resolution: Resolution, node: fx.Node) -> Mixture:
    formats = {source.name: _format_given(resolution, source.name, node.name) for source in node.all_input_nodes}
    wide = [source for source in node.all_input_nodes if formats[source.name] == "fp32"]
    low = tuple(name for name, format in formats.items() if is_low(format))
    parameters = {place.name for place in policy.capture.placeholders if place.kind == "parameter"}

    def makers(reader: fx.Node) -> Iterator[fx.Node]:
        """The FP32 inputs that make an operation's result FP32; none if the operation itself does."""
        if reader.op != "call_function" or _is_origin(policy, reader):
            return
        for source in reader.all_input_nodes:
            if source.name not in parameters and _format_given(resolution, source.name, reader.name) == "fp32":
                yield source

    reached = set(reach(wide, lambda reader: list(makers(reader))))
    chain = [each for each in policy.capture.graph_module.graph.nodes if each in reached]
    first = [each for each in chain if not any(makers(each))]
    meetings = [
        (each.name, source.name)
        for each in chain
        for source in each.all_input_nodes
        if each not in first and is_low(_format_given(resolution, source.name, each.name))
    ]
    return Mixture(
        wide=tuple(source.name for source in wide),
        low=low,
        origins=tuple(each.name for each in first),
        meetings=tuple(meetings),
        chain=tuple(each.name for each in chain),
        written=tuple(each.name for each in first if _is_written(each)),
    )


def _is_origin(policy: Policy, node: fx.Node) -> bool:
    """Whether the result is FP32 whatever the inputs are: the code requests a dtype, or autocast runs it in FP32."""
    return _asks(node) or policy.casts(policy.capture.nodes[node.name]).autocast in ("fp32", "fp32_unless_dtype")


def _asks(node: fx.Node) -> bool:
    """Whether the code requests a dtype: a conversion, or an argument."""
    return row_of(node).cast or any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))


def _is_written(node: fx.Node) -> bool:
    """Whether the code decides the dtype of an operation's result: it requests one, or makes a tensor from numbers."""
    return node.op == "call_function" and (_asks(node) or not node.all_input_nodes)


def _format_given(resolution: Resolution, source: str, reader: str) -> str:
    """The format in which a reader's kernel receives a value, after the casts of a plan and of autocast."""
    typed, own = resolution.nodes[reader], resolution.dtypes[source]
    if source in typed.rounded:
        return typed.kernel if is_low(typed.kernel) else "low"
    if source in typed.cast:
        return "fp32" if is_low(own) else own
    return own
