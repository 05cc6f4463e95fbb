"""DistributedDataParallel and FSDP: every rank saves its own batch, and only the guilty one's step fails in a replay."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import auditor
from auditor.errors import LoadError
from auditor.features.watch import capsule as files
from auditor.features.watch.objects import with_all_ranks
from auditor.features.watch.recorder import inert_recorders
from auditor.features.watch.replay import replay
from tests.features.watch import ranks
from tests.features.watch.ranks import BAD_RANK, BAD_STEP

LINES = Path(ranks.__file__).read_text(encoding="utf-8").splitlines()
LINE = f"ranks.py:{next(i for i, text in enumerate(LINES, 1) if text.endswith('# <- ranks'))}"


def train(folder: Path, kind: str, world: int) -> list[Path]:
    """The capsules of all ranks, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-W", "ignore", ranks.__file__, str(folder), kind]
    children = [subprocess.Popen([*words, str(rank), str(world), port]) for rank in range(world)]
    assert [child.wait(timeout=240) for child in children] == [0] * world
    return [next(folder.glob(f"step-{BAD_STEP:06d}-*-rank{rank}")) for rank in range(world)]


def explained(path: Path) -> Any:
    model = ranks.Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks.model, ranks.optimizer = model, optimizer
    with inert_recorders() as made:
        auditor.watch(model, optimizer)
    return replay(path, ranks.step, "ranks.py:step", made)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_has_its_batch_and_one_is_guilty(world: int, tmp_path: Path) -> None:
    paths = train(tmp_path, "ddp", world)
    for rank, path in enumerate(paths):
        capsule = files.read(path)
        assert (capsule.about.rank, capsule.about.world) == (rank, world)
        assert torch.equal(capsule.calls[0].batch[0][0], ranks.batch(rank, BAD_STEP)[0])
        assert capsule.about.kind == ("loss-not-finite" if rank == BAD_RANK else "gradients-not-finite")
    guilty = explained(paths[BAD_RANK])
    assert (guilty.is_reproduced, guilty.culprit.line) == (True, LINE)
    innocent = explained(paths[0])
    assert not innocent.is_reproduced
    assert f"came from another rank: replay {paths[BAD_RANK].name}" in innocent.verdict


@pytest.mark.slow
def test_the_parts_of_all_ranks_make_the_weights_of_a_sharded_model(tmp_path: Path) -> None:
    paths = train(tmp_path, "fsdp", 2)
    own = files.read(paths[BAD_RANK])
    assert own.weights["inner.weight"].shape == (4, 8)
    whole = with_all_ranks(paths[BAD_RANK], own)
    assert whole.weights["inner.weight"].shape == (8, 8)
    guilty = explained(paths[BAD_RANK])
    assert (guilty.is_reproduced, guilty.culprit.line) == (True, LINE)
    paths[0].rename(tmp_path / "elsewhere")
    with pytest.raises(LoadError, match=r"no capsule of rank 0 lies beside it"):
        with_all_ranks(paths[BAD_RANK], own)
