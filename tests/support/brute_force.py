"""The slow truth that the first-order answers are held against: one node low at a time, the model run to its end."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from auditor.isolation.outputs import tensor_outputs
from auditor.measure.measure import Measurement
from auditor.numerics.metrics import output_error
from auditor.numerics.nodes import arguments_of, operation_of
from tests.support.subjects import DTYPES


class OneLow(fx.Interpreter):
    """Runs the graph in FP32 but for one node: its inputs are rounded, it is computed in FP32, its result rounded.

    Where CUDA adds a bias apart, the product is rounded before, too.
    """

    def __init__(self, graph_module: fx.GraphModule, name: str, fmt: str) -> None:
        super().__init__(graph_module)
        self.name, self.dtype = name, DTYPES[fmt]

    def run_node(self, n: fx.Node) -> Any:
        if n.name != self.name:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        low_args, low_kwargs = self._rounded((args, kwargs))
        given = arguments_of(n.target, low_args, low_kwargs)
        if not adds_bias_apart(n.target, given):
            return self._rounded(n.target(*low_args, **low_kwargs))
        bias = given.pop("bias")
        product = self._rounded(n.target(**given))
        trailing = 0 if operation_of(n.target).packet == "linear" else product.dim() - 2
        return self._rounded(product + bias.reshape(-1, *[1] * trailing))

    def _rounded(self, tree: Any) -> Any:
        """Rounded to the format, in FP32."""
        return self._to(self._to(tree, self.dtype), torch.float32)

    @staticmethod
    def _to(tree: Any, dtype: torch.dtype) -> Any:
        def convert(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if x.is_floating_point() else x

        return torch.utils._pytree.tree_map_only(torch.Tensor, convert, tree)


def adds_bias_apart(target: Any, given: Mapping[str, Any]) -> bool:
    """Whether one kernel computes a product, and another adds its bias: in convolutions, except depthwise ones, and in
    linear layers whose rows are not contiguous. Source: aten/src/ATen/native, Convolution.cpp and Linear.cpp."""
    if given.get("bias") is None:
        return False
    packet, x = operation_of(target).packet, given["input"]
    if packet == "linear":
        return x.dim() > 2 and not x.is_contiguous()
    is_transposed = packet.startswith("conv_transpose")
    is_depthwise = not is_transposed and given.get("groups", 1) > 1 and given["weight"].shape[1] == 1
    return packet.startswith("conv") and not is_depthwise


def true_isolated(measured: Measurement, name: str, fmt: str) -> float:
    """Error of the outputs when this node alone runs in the format."""
    reference = [x.detach() for x in measured.outputs]
    flat = [x.detach() if isinstance(x, torch.Tensor) else x for x in measured.flat_inputs]
    with torch.no_grad():
        outputs = OneLow(measured.capture.graph_module, name, fmt).run(*flat)
    return output_error(reference, tensor_outputs(outputs))


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; ties are not expected among measured errors."""
    ranks = [torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
