"""What flags that change the arithmetic of products would cost: each is a row, emulated on a sample of every product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..errors import let_through
from ..numerics.accumulators import rounded_sum, truncated_sum
from ..numerics.casting import round_to
from ..numerics.formats import FORMATS
from ..numerics.fp32_output import FACTORS
from ..numerics.metrics import relative_l2
from ..numerics.nodes import row_of, target_of
from ..records import Capture, Contribution, NodeError
from .products import sample

ENTRIES = 16
"""Number of rows and columns of a product that are summed."""


class Flag(NamedTuple):
    """of: operations that follow it. reads: format of the factors, scaled to its range if it has 8 bits. sum: its
    accumulator; None: FP32, and the rounding of the factors counts instead."""

    of: str
    reads: str
    sum: Callable[[Tensor], Tensor] | None = None


FLAGS: Mapping[str, Flag] = {
    "cuda.matmul.allow_tf32": Flag("product", "tf32"),
    "cudnn.allow_tf32, convolutions": Flag("convolution", "tf32"),
    "cudnn.allow_tf32, recurrent layers": Flag("recurrent", "tf32"),
    "allow_fp16_accumulation": Flag("product", "fp16", partial(rounded_sum, format="fp16", step=16)),
    "allow_fp16_reduced_precision_reduction": Flag("product", "fp16", partial(rounded_sum, format="fp16")),
    "allow_bf16_reduced_precision_reduction": Flag("product", "bf16", partial(rounded_sum, format="bf16")),
    "FP8 sums in 14 bits": Flag("product", "fp8_e4m3", partial(truncated_sum, bits=14, step=32)),
    "FP8 sums in 14 bits, in FP32 after 128 terms": Flag(
        "product", "fp8_e4m3", partial(truncated_sum, bits=14, step=32, promoted=128)
    ),
}


def flag_errors(n: fx.Node, values: Mapping[str, Any]) -> dict[str, float]:
    """{flag: relative L2 error of a product under it}, on a sample, for the flags that the product follows.

    values: FP32 results by name. Nothing for operations that cannot be computed in FP64.
    """
    row = row_of(n)
    of = "product" if row.packet in FACTORS else row.gemm
    named = {name: flag for name, flag in FLAGS.items() if flag.of == of}
    if not named or n.kwargs:
        return {}
    args = fx.node.map_arg(n.args, lambda source: values[source.name])
    try:
        return {name: _local_error(n, args, flag) for name, flag in named.items()}
    except Exception as error:  # a subclass of Tensor, or a kernel that FP64 does not have
        let_through(error)
        return {}


def flag_costs(
    capture: Capture,
    errors: Mapping[str, Mapping[str, NodeError]],
    contributions: Mapping[str, Mapping[str, Contribution]],
    under_flags: Mapping[str, Mapping[str, float]],
    budget: float,
) -> dict[str, float]:
    """{flag: predicted share of the error budget that this flag alone would use}, if some operation follows the flag.
    under_flags: by node, results of `flag_errors`.

    A product's own contribution in a format is scaled by its error under the flag, divided by the error of rounding its
    result. A recurrent layer's contribution is scaled by the spacing of TF32's numbers.
    """
    squares = dict[str, float]()
    for n in capture.graph_module.graph.nodes:
        for fmt, error in [*errors.get(n.name, {}).items()][:1]:
            effect, split = contributions[n.name][fmt], error.product
            if row_of(n).recurrent:
                cost = effect.isolated * FORMATS["tf32"].epsilon / FORMATS[fmt].epsilon
                costs = {name: cost for name, flag in FLAGS.items() if flag.of == "recurrent"}
            elif split is not None and split.output:
                costs = {name: effect.own * local / split.output for name, local in under_flags[n.name].items()}
            else:
                costs = {}
            for name, cost in costs.items():
                squares[name] = squares.get(name, 0.0) + cost**2
    return {name: math.sqrt(squares[name]) / budget for name in FLAGS if name in squares}


def _local_error(n: fx.Node, args: Any, flag: Flag) -> float:
    """Relative L2 error of a product under a flag, on a sample."""
    row, (first, second) = FORMATS[flag.reads], FACTORS.get(row_of(n).packet, (0, 1))
    given = [x.double() if isinstance(x, Tensor) else x for x in sample(target_of(n), args)]
    exact = target_of(n)(*given)
    for position in (first, second):
        scale = row.largest / given[position].abs().max().clamp(min=1e-30) if row.bytes == 1 else 1.0
        given[position] = round_to((given[position] * scale).float(), row.name).double()
    if flag.sum is None:
        return relative_l2(exact, target_of(n)(*given))
    x, y = given[first], given[second].mT if row_of(n).gemm == "linear" else given[second]
    x, y = x.view(1, -1) if x.dim() == 1 else x, y.view(-1, 1) if y.dim() == 1 else y
    x, y = (z.reshape(-1, *z.shape[-2:])[0] for z in (x, y))
    x, y = x[:: len(x) // ENTRIES or 1][:ENTRIES], y[:, :: y.shape[1] // ENTRIES or 1][:, :ENTRIES]
    return relative_l2(x @ y, flag.sum(x.T.unsqueeze(-1) * y.unsqueeze(1)))  # [k, m, 1] * [k, 1, n] -> [k, m, n]
