"""Autocast regions: one stack for all device types, whoever asks is told of it, and afterwards all is as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from auditor.capture.regions import Region, entered_at, one_stack, region_now, written_as_meant


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
