"""A process group of one, so that collectives can be traced and run."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
