"""The rule and the table: every kernel without a row of its own rounds once, forwards and backwards; every row has a function."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.numerics.cuda_exceptions import ROUNDINGS
from auditor.numerics.kernels import run_op
from auditor.resources import table
from tests.support.subjects import DTYPES

TABLE = table("numerics/cuda_kernels")
BY_OTHERS = {"fused_attention"}
"""Rules whose function is not a kernel below autograd."""

aten = torch.ops.aten


def test_every_exception_has_a_function_a_source_and_a_degree_of_certainty() -> None:
    rules = [row["rule"] for row in TABLE["exceptions"]]
    assert len(rules) == len(set(rules))
    assert set(rules) == set(ROUNDINGS) | BY_OTHERS
    for row in TABLE["exceptions"]:
        assert row["sure"] in ("published", "binary", "read", "header", "known")
        assert row["source"]
        assert row["says"]


def test_every_name_in_the_table_is_an_operation_of_torch() -> None:
    names = {name for row in TABLE["exceptions"] for name in row["operations"]}
    names |= {name for key in ("unfold", "whole", "move", "move_by_index", "native") for name in TABLE["kernels"][key]}
    names |= {name for key in ("checked", "rounded") for name in TABLE["numbers"][key]}
    names |= {name for key in ("promote", "same", "out") for name in TABLE["mixtures"][key]}
    names |= {*TABLE["results"], *TABLE["writes"], *TABLE["mixtures"]["equal"], *TABLE["mixtures"]["fp32_beside_low"]}
    packets = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    known = packets | {name.removesuffix("_") for name in packets}
    assert sorted(names - known) == []


@pytest.fixture(scope="module")
def shares(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, list[str]]]:
    """{operation and format: (largest share of entries that differ from the rule, kernels with a row of their own)}."""
    file = tmp_path_factory.mktemp("rule") / "shares.pickle"
    command = [sys.executable, "-m", "tests.emulation.rule", str(file)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    return pickle.loads(file.read_bytes())


@pytest.mark.slow
def test_what_has_no_row_of_its_own_follows_the_rule(shares: dict[str, tuple[float, list[str]]]) -> None:
    assert len(shares) > 900
    off = {name: share for name, (share, rows) in shares.items() if not rows and not share <= 0.002}
    assert off == {}


@pytest.mark.slow
def test_most_operations_have_no_row_of_their_own(shares: dict[str, tuple[float, list[str]]]) -> None:
    assert sum(not rows for _, rows in shares.values()) > len(shares) / 2


# Exceptions by hand, with the arithmetic beside the numbers.


def run(target: Any, *args: Any, dtype: torch.dtype = torch.float16, **kwargs: Any) -> list[float]:
    low = [torch.tensor(x, dtype=dtype) if isinstance(x, list) else x for x in args]
    return run_op(target, tuple(low), kwargs).double().flatten().tolist()


def test_a_number_divides_by_its_inverse() -> None:
    # FP16: 41 * fp32(1 / 41) = 0.99999994: trunc gives 0; division would give 1
    assert run(aten.div.Scalar_mode, [41.0], 41, rounding_mode="trunc") == [0.0]


def test_counts_stop_where_the_format_has_no_next_integer() -> None:
    # 3,000 ones into one entry: 2048 + 1 is a tie to even, 2048; BF16 stops at 256
    for dtype, last in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        ones, index = torch.ones(3000, dtype=dtype), torch.zeros(3000, dtype=torch.int64)
        for target in (aten.scatter_add.default, aten.index_add.default):
            assert run_op(target, (torch.zeros(1, dtype=dtype), 0, index, ones), {}).item() == last


def test_numbers_stay_in_fp32_or_are_rounded() -> None:
    # BF16 has 1.0 and 1.0078125 = 1 + 2^-7: 1 + 0.0039 = 1.0039 rounds down; alpha = 3.1 is not 3.09375 or 3.109375
    assert run(aten.add.Tensor, [1.0], 0.0039, dtype=torch.bfloat16) == [1.0]
    # 100 + 3.1 * 100 = 410 exactly between 408 and 412? BF16 spaces by 2 from 256 on: 410; with alpha 3.09375: 409.4 -> 410
    assert run(aten.add.Tensor, [1.0], [1000.0], alpha=3.1, dtype=torch.bfloat16) == [3104.0]  # 3101; 3.09375: 3088
    # a comparison rounds: 0.1 is 0.10009765625 in BF16
    assert run(aten.gt.Scalar, [0.10009765625], 0.1, dtype=torch.bfloat16) == [0.0]


def test_a_cube_rounds_its_square() -> None:
    # FP16: 1.3 is 1.2998046875, its square 1.68949 rounds to 1.689453125 = 1730 / 1024, times 1.2998 = 2.19596
    x = torch.tensor(1.3).half()
    square = float((x.float() * x.float()).half())
    assert run(aten.pow.Tensor_Scalar, [1.3], 3) == [float((torch.tensor(square) * x.float()).half())]


@pytest.mark.parametrize("fmt", DTYPES)
def test_a_convolution_adds_its_bias_to_a_rounded_product(fmt: str) -> None:
    torch.manual_seed(0)
    dtype = DTYPES[fmt]
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((2, 4, 9), (6, 4, 3), (6,)))
    product = torch.conv1d(x.float(), weight.float()).to(dtype)
    by_hand = (product.float() + bias.float()[:, None]).to(dtype)
    assert torch.equal(run_op(aten.conv1d.default, (x, weight, bias), {}), by_hand)
    once = torch.conv1d(x.float(), weight.float(), bias.float()).to(dtype)
    assert not torch.equal(by_hand, once)


def test_a_large_image_has_no_loss_in_fp16() -> None:
    """PyTorch issue 29429: the number of pixels is beyond FP16's range."""
    x, target = torch.zeros(1, 2, 256, 257).half(), torch.zeros(1, 256, 257, dtype=torch.int64)
    loss, weight = run_op(aten.nll_loss2d_forward.default, (x, target, None, 1, -100), {})
    assert torch.isinf(weight)
    assert float(loss) == 0.0
