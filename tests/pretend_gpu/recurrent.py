"""Recurrent layers of the pretend GPU: whole, as cuDNN runs them, with cuDNN's conditions."""

from typing import Any

import torch
from torch._decomp import decomposition_table

from auditor.numerics.cells import STEPS
from auditor.numerics.entries import over_tensors, tensors_in
from auditor.numerics.kernels import run_op
from tests.pretend_gpu.kernels import drawing, lent
from tests.pretend_gpu.memory import on_pretend


def run(op: Any, *args: Any) -> Any:
    """A recurrent layer over a sequence; step by step where cuDNN is off, or a gradient is wanted, which autograd then finds."""
    tensors = [x for x in tensors_in(args) if x.is_floating_point()]  # a packed sequence's lengths stay on the CPU
    if len({x.device for x in tensors}) > 1:
        raise RuntimeError("Input and parameter tensors are not at the same device")
    if len({x.dtype for x in tensors}) > 1:
        raise RuntimeError("RNN input and parameters have different dtypes")
    train = dict(zip((a.name for a in op._schema.arguments), args, strict=True))["train"]
    way_back = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not torch.backends.cudnn.enabled or (train and way_back):
        return decomposition_table[op](*args)
    return _Whole.apply(op, args, *tensors)


def cell(op: Any, *args: Any) -> Any:
    """The gates of one step, as CUDA's fused kernels compute them: in float32, and rounded once; autograd finds the way back."""
    from_input, from_state, state, *biases = over_tensors(lambda x: x.float(), args)
    from_input, from_state = (
        product if bias is None else product + bias
        for product, bias in zip((from_input, from_state), biases or (None, None), strict=True)
    )
    kind = op._schema.name.removeprefix("aten::_thnn_fused_").removesuffix("_cell")
    results = STEPS[kind](from_input, from_state, (state, state))[: 2 if kind == "lstm" else 1]  # the cell is an LSTM's
    return (*(x.to(args[0].dtype) for x in results), torch.empty(0, device=args[0].device))  # the last: its workspace


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, args: Any, *tensors: torch.Tensor) -> Any:
        index = tensors[0].device.index
        with drawing(op, index):
            result = run_op(op, over_tensors(lent, args), {})
        return over_tensors(lambda x: on_pretend(x, index), result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
