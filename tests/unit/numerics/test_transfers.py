"""A transfer is no cast, whatever dtype its value has by then."""

from __future__ import annotations

import pytest
import torch

from auditor.numerics.nodes import op_name, to_device
from auditor.numerics.operations import operation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    moved = to_device(torch.ones(2, 3, dtype=dtype), torch.device("meta"))
    assert (moved.dtype, moved.device.type, moved.shape) == (dtype, "meta", (2, 3))


def test_patterns_look_through_it() -> None:
    row = operation(op_name(to_device))
    assert row.known and row.transparent and not row.cast
