"""Rounding reference values to a format on their way into an operation that is run low."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..execution.execute import low_literals
from ..numerics.casting import in_format, lowered
from ..numerics.formats import FORMATS, Format
from ..records import Capture


@dataclass(frozen=True)
class Rounder:
    """Rounds the tensors of a tree to a format; masked entries become what the model itself would write there.

    sentinels: {float32 value: value in the format} of the literals with which Python marks what to mask.
    """

    row: Format
    sentinels: Mapping[float, float]

    def __call__(self, tree: Any) -> Any:
        """Tensors in the format, the rest as it is."""

        def convert(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = lowered(x, self.row)
            for ours, theirs in self.sentinels.items() if x.dtype is torch.float32 else ():
                result = in_format(torch.where(x == ours, torch.full_like(result, theirs), result), self.row)
            return result

        return pytree.tree_map_only(torch.Tensor, convert, tree)


def rounder(capture: Capture, fmt: str) -> Rounder:
    """The rounding of a capture's values to one format."""
    nodes = {node.name: node for node in capture.graph_module.graph.nodes}
    found = {}
    for name, node in capture.nodes.items():
        literals = low_literals(node, fmt)
        for key, value in literals.arguments.items() if literals else ():
            ours = nodes[name].args[key] if isinstance(key, int) else nodes[name].kwargs.get(key)
            if isinstance(value, (int, float)) and isinstance(ours, (int, float)):
                found[float(ours)] = float(value)
    return Rounder(FORMATS[fmt], found)
