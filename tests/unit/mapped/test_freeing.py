"""Large memory goes back as soon as it is free, though small pieces are held that were made beside it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from auditor.mapped.freeing import LEAST, freeing
from auditor.mapped.limit import resident


def test_what_is_free_is_no_longer_resident() -> None:
    with freeing(LEAST):
        before, small = resident(), list[bytes]()
        for _ in range(40):
            large = torch.ones(2_500_000)
            small += [bytes(1000) for _ in range(200)]
            del large
        assert resident() - before < 40_000_000


REPEATED = """
import resource
import torch
from auditor.mapped.freeing import keep_freed
keep_freed()
def results():
    return [torch.ones(2_000_000) for _ in range(6)]
results(), results()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    results()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_is_kept_is_not_handed_out_again_page_by_page() -> None:
    # Without it most processes, by how their memory lies, take every page anew.
    def faults() -> int:
        return int(subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True, check=True).stdout)

    pages = 20 * 6 * 8_000_000 // 4096
    assert max(faults() for _ in range(3)) < pages / 10
