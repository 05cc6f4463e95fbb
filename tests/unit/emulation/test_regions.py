"""Autocast regions: one stack for all device types, whoever asks is told of it, and afterwards all is as before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import auditor
from auditor.emulation.regions import Region, cast_weight, entered_at, one_stack, region_now, written_as_meant
from tests.support.capturing import Function
from tests.support.subjects import capture_of


def test_regions_of_all_devices_are_one_stack() -> None:
    with one_stack():
        with torch.autocast("cuda", dtype=torch.float16):
            assert region_now() == Region(True, "float16")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert region_now() == Region(True, "bfloat16")
                with torch.autocast("cuda", enabled=False):
                    assert not region_now().enabled
                assert region_now() == Region(True, "bfloat16")
            assert region_now() == Region(True, "float16")
        assert not region_now().enabled


def test_the_region_around_is_the_first_one() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), one_stack():
        assert region_now() == Region(True, "bfloat16")
    with one_stack(around=torch.float32):
        assert region_now() == Region(True, "float32")


def test_decorators_and_regions_entered_twice() -> None:
    with one_stack():
        region = torch.autocast("cuda", dtype=torch.bfloat16)

        @region
        def inside(depth: int) -> Region:
            return inside(depth - 1) if depth else region_now()

        @torch.autocast("cpu", enabled=False)
        def outside() -> Region:
            return region_now()

        assert inside(2) == Region(True, "bfloat16")
        with region:
            assert not outside().enabled
        assert not region_now().enabled


def test_decorators_made_at_import_keep_what_they_say() -> None:
    with written_as_meant():

        @torch.autocast("cuda", dtype=torch.bfloat16)
        def inside() -> Region:
            return region_now()

    with one_stack():
        assert inside() == Region(True, "bfloat16")


def test_regions_left_open_end_with_the_stack() -> None:
    with one_stack():
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        assert region_now().enabled


def test_generators_that_outlive_the_stack() -> None:
    @contextmanager
    def held() -> Iterator[None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield

    with one_stack():
        region = held()
        region.__enter__()
    region.__exit__(None, None, None)


def test_weights_made_in_inference_mode_are_cast_once_per_region_too() -> None:
    with torch.inference_mode():
        made = nn.Linear(4, 4)
    assert made.weight.is_inference() and made.weight.requires_grad
    with torch.no_grad(), auditor.emulate("cuda"), torch.autocast("cuda", dtype=torch.float16):
        out = made(torch.ones(2, 4))
        assert torch.equal(out, made(torch.ones(2, 4)))
    assert out.dtype is torch.float16
    with one_stack(), torch.autocast("cuda", dtype=torch.float16):
        assert cast_weight(made.weight, torch.float16) is cast_weight(made.weight, torch.float16)


def test_depth_is_that_of_the_innermost_region() -> None:
    depth = 3
    with one_stack(lambda: depth):
        assert entered_at() == 0
        with torch.autocast("cuda"):
            assert entered_at() == 3
            depth = 5
            with torch.autocast("cuda", enabled=False):
                assert entered_at() == 5
            assert entered_at() == 3


# Autocast regions the author wrote, remembered node by node.

SQUARE = torch.eye(3)


def regions(function: Any, *inputs: Tensor) -> dict[str, tuple[bool, str]]:
    """{operation: region} of a function."""
    found = capture_of(Function(function), *inputs)
    return {n.op.split(".")[1]: (n.region.enabled, n.region.dtype) for n in found.nodes.values() if n.region}


def nested(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = x.exp()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = y.matmul(y)
            with torch.autocast("cpu", enabled=False):
                y = y.float().sigmoid()
        y = y.tanh()
    return y.sum()


def test_the_innermost_region_counts() -> None:
    found = regions(nested, SQUARE)
    assert found["matmul"] == (True, "bfloat16")
    assert {name: on for name, (on, _) in found.items() if name != "to"} == {
        "exp": False,
        "matmul": True,
        "sigmoid": False,
        "tanh": False,
    }


def asking(x: Tensor) -> Tensor:
    """Switches autocast off only where it is on, as careful library code does."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return x.float().matmul(x.float())
    return x.matmul(x)


def test_code_that_asks_whether_autocast_is_on_shows_what_it_protects() -> None:
    assert regions(asking, SQUARE)["matmul"][0] is False
