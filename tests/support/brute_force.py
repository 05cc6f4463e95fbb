"""The slow truth that the first-order answers are held against: one node low at a time, the model run to its end."""

from typing import Any

import torch
from torch import fx

from auditor.isolation.outputs import tensor_outputs
from auditor.measure.measure import Measurement
from auditor.numerics.metrics import output_error
from tests.support.subjects import DTYPES


class OneLow(fx.Interpreter):
    """Runs the graph in FP32 but for one node: its inputs are rounded, it is computed in FP32, its result rounded."""

    def __init__(self, graph_module: fx.GraphModule, name: str, fmt: str) -> None:
        super().__init__(graph_module)
        self.name, self.dtype = name, DTYPES[fmt]

    def run_node(self, n: fx.Node) -> Any:
        if n.name != self.name:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        low = self._to(self._to((args, kwargs), self.dtype), torch.float32)
        result = n.target(*low[0], **low[1])
        return self._to(self._to(result, self.dtype), torch.float32)

    @staticmethod
    def _to(tree: Any, dtype: torch.dtype) -> Any:
        def convert(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if x.is_floating_point() else x

        return torch.utils._pytree.tree_map_only(torch.Tensor, convert, tree)


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
