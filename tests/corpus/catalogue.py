"""All cases of the corpus, and the ways in which the tests run them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from auditor.isolation.outputs import tensor_outputs
from tests.corpus import (
    accumulation,
    cancellation,
    overflow,
    overflow_curves,
    positions,
    training,
    underflow,
    unsupported,
)
from tests.corpus.case import Case

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_FILES = (overflow, overflow_curves, underflow, positions, cancellation, accumulation, unsupported, training)
CASES: tuple[Case, ...] = tuple(case for file in _FILES for case in file.CASES)
INFERENCE = tuple(case for case in CASES if case.mode == "inference")


def plainly(model: nn.Module, inputs: tuple[Any, ...], fmt: str, mode: str = "inference") -> list[Tensor]:
    """Outputs (gradients of the parameters, in mode "train") of a copy that is cast as a whole, inputs too."""
    model = copy.deepcopy(model).to(DTYPES[fmt])
    args = pytree.tree_map_only(Tensor, lambda x: x.to(DTYPES[fmt]) if x.is_floating_point() else x, inputs)
    if mode == "inference":
        with torch.no_grad():
            return tensor_outputs(model(*args))
    model(*args).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]
