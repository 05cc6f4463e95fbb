"""The examples that rule files carry, as models: the code on which a rule fires, and the same code repaired."""

import linecache
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.rulebook.rule import Rule
from tests.support.capturing import Function


def example(rule: Rule, *, fixed: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Model and inputs of a rule's example; the same every time."""
    assert rule.example is not None, f"{rule.code} has no example"
    code = rule.example.fixed if fixed else rule.example.code
    name = f"<{rule.code}, {'fixed' if fixed else 'example'}>"
    # Tracing asks linecache for the text of each line: casts are told apart by it where no low trace can be made.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    torch.manual_seed(0)
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math, "__name__": name}
    exec(compile(code, name, "exec"), space)
    model = space["model"] if "model" in space else Function(space["forward"])
    return model.eval(), tuple(eval(text, space) for text in rule.example.inputs)


class Side(nn.Module):
    """Models side by side, each under the name of its rule and with inputs of its own."""

    def __init__(self, parts: Sequence[tuple[str, nn.Module, int]]) -> None:
        super().__init__()
        self.counts = [count for _, _, count in parts]
        self.names = [name for name, _, _ in parts]
        for name, model, _ in parts:
            self.add_module(name, model)

    def forward(self, *inputs: Tensor) -> list[Any]:
        results, at = [], 0
        for name, count in zip(self.names, self.counts, strict=True):
            results.append(self.get_submodule(name)(*inputs[at : at + count]))
            at += count
        return results
