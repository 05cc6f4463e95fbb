"""An audit by several processes is the audit by one; where one of them is lost, it ends in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auditor import ranks
from auditor.errors import RankError
from auditor.raised import let_through

MODEL = """
import os
from pathlib import Path

import torch
from torch import nn


class Steep(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        if HOW and os.environ.get("RANK") == "1":
            with open("calls", "a") as calls:
                calls.write("x")
            if Path("calls").stat().st_size == 8:
                HOW()
        return x + self.wide(torch.exp(self.narrow(x) * 4))


def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Steep(), nn.LayerNorm(16), nn.Linear(16, 10), nn.Softmax(-1))


def get_inputs():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 16, generator=generator) * (index + 1),) for index in range(5)]


def fail():
    raise ValueError("only here")


HOW = {how}
"""


def audited(folder: Path, how: str, out: str, processes: int) -> subprocess.CompletedProcess[str]:
    (folder / "steep.py").write_text(MODEL.replace("{how}", how), encoding="utf-8")
    several = ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    command = [sys.executable, "-m", *several, "auditor", "steep.py", "--out", out]
    here = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_two_processes_find_what_one_finds(tmp_path):
    alone, both = audited(tmp_path, "None", "one", 1), audited(tmp_path, "None", "two", 2)
    assert (alone.returncode, both.returncode) == (0, 0), both.stderr
    assert both.stdout == alone.stdout.replace("one/", "two/")
    assert both.stderr.count("RANDOM") == 1  # the leader alone speaks
    records = [json.loads((tmp_path / out / "plan.json").read_text()) for out in ("one", "two")]
    for record in records:
        assert record["plans"]["cast_fp16"]["scopes"]
        record["environment"].pop("seconds")
    assert records[0] == records[1]
    assert (tmp_path / "one/patched_model.py").read_bytes() == (tmp_path / "two/patched_model.py").read_bytes()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fail", "rank 1 could not run a batch that others can: ValueError: only here"),
        ("lambda: os.kill(os.getpid(), 9)", "nothing was written"),
    ],
)
def test_a_rank_that_is_lost_ends_the_audit_in_one_line(tmp_path, how, said):
    run = audited(tmp_path, how, "out", 2)
    assert run.returncode != 0
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ") and "error: rank 1: " not in line]
    assert len(errors) == 1
    assert said in errors[0]
    assert "auditor/cli" not in run.stderr  # torchrun's own traceback is its own
    assert not (tmp_path / "out").exists()
    assert run.stdout == ""


def exchanging(monkeypatch, rank, others):
    """This process is one rank; what the others bring to each gathering is known."""
    for name in ranks.TOGETHER:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def gather(job):
        jobs = [others, others]
        jobs[rank] = job
        return jobs

    monkeypatch.setattr(ranks, "_gathered", gather)


def test_the_first_that_is_enough_ends_the_sharing(monkeypatch):
    """Items 0, 2, 4 are this rank's, which stops at 2; the other brings 1 and 3."""
    exchanging(monkeypatch, 0, ranks._Job("squares", [1, 9]))
    worked = []

    def square(item):
        worked.append(item)
        return item**2

    assert ranks.shared("squares", range(5), square, enough=lambda found: found >= 4) == [0, 1, 4]
    assert worked == [0, 2]


def test_ranks_that_go_different_ways_are_told_apart(monkeypatch):
    exchanging(monkeypatch, 0, ranks._Job("cubes", [1]))
    with pytest.raises(RankError, match="rank 0 at 'squares', rank 1 at 'cubes'"):
        ranks.shared("squares", range(2), lambda item: item**2)


def test_what_this_rank_raises_is_raised_as_it_is(monkeypatch):
    exchanging(monkeypatch, 0, ranks._Job("work", [1]))
    with pytest.raises(ZeroDivisionError):
        ranks.shared("work", [0, 1], lambda item: 1 // item)


def test_one_rank_alone_does_not_hide_its_loss_in_a_failed_candidate():
    """Searching takes what a run raises for an answer; this is none."""
    with pytest.raises(RankError):
        let_through(RankError("gone", "rank-lost"))


def test_without_a_launcher_items_are_worked_on_in_order():
    assert not ranks.launched()
    assert ranks.rank() == 0
    assert ranks.shared("squares", [3, 1], lambda item: item**2) == [9, 1]
    assert ranks.folded("sums", [3, 1], lambda item: item, lambda a, b: a - b) == 2
    assert ranks.each_rank("one", 5) == [5]
    assert ranks.part([1, 2]) == [1, 2]
