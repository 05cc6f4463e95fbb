"""Values raised, lowered, and computed with in float32."""

from __future__ import annotations

import torch

from auditor.numerics.casting import carried_in, in_float32, lowered, raised
from auditor.numerics.formats import FORMATS

aten = torch.ops.aten


def test_in_float32_raises_computes_and_rounds() -> None:
    # 2048 + 1 + 1 = 2050 in FP32, a value of fp16; step by step in fp16 it stays 2048
    x = torch.tensor([2048.0, 1.0, 1.0]).half()
    result = in_float32(aten.sum.default, (x,), {}, FORMATS["fp16"])
    assert (float(result), result.dtype) == (2050.0, torch.float16)


def test_raising_and_lowering_leave_other_types_alone() -> None:
    tree = {"half": torch.ones(1).half(), "double": torch.ones(1).double(), "index": [torch.tensor([1])], "literal": 2}
    up, down = raised(tree), lowered({**tree, "full": torch.ones(1)}, FORMATS["bf16"])
    assert (up["half"].dtype, up["double"].dtype, up["index"][0].dtype) == (torch.float32, torch.float64, torch.int64)
    assert (down["half"].dtype, down["full"].dtype, down["double"].dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float64,
    )
    assert up["literal"] == down["literal"] == 2


def test_raising_forgets_what_a_tensor_carried() -> None:
    # 1.3 in FP8 E4M3, spaced by 1/8 between 1 and 2: 1.25
    carried = lowered(torch.tensor([1.3]), FORMATS["fp8_e4m3"])
    assert (float(carried), carried_in(carried)) == (1.25, FORMATS["fp8_e4m3"])
    up = raised(carried)
    assert (float(up), up.dtype, carried_in(up)) == (1.25, torch.float32, None)
