"""Two processes train a patched model: DistributedDataParallel and FSDP2 synchronise it as they would any other."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from auditor.artefact.applying import is_wrapped
from tests.support.patching import PLANS, patched
from tests.support.subjects import normal

WORLD = 2
ROWS = 8
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def trained(model: nn.Module, x: Tensor) -> Tensor:
    """One backward pass; the outputs."""
    output = model(x)
    output.float().square().sum().backward()
    return output.detach()


def ddp(name: str, x: Tensor) -> dict[str, Tensor]:
    model = DistributedDataParallel(patched(name))
    output = trained(model, x)
    return {"output": output, **{n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}}


def fsdp(name: str, x: Tensor) -> dict[str, Tensor]:
    """Each group of FSDP2 has one dtype, so the islands of a cast plan are groups of their own."""
    from torch.distributed.fsdp import fully_shard

    model = patched(name)
    for part in (model.first, model.norm, model.head[2]):
        fully_shard(part)
    fully_shard(model)
    output = trained(model, x)
    assert sorted(path for path, module in model.named_modules() if is_wrapped(module)) == ["", "head.2", "norm"]
    return {"output": output, **{n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}}


def work(rank: int, rendezvous: str, answers: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    share = normal(ROWS, 4).chunk(WORLD)[rank]
    found = {f"{way.__name__} {name}": way(name, share.clone()) for way in (ddp, fsdp) for name in PLANS}
    torch.save(found, f"{answers}.{rank}")
    dist.barrier()  # a rank that goes first takes away what the other's threads still wait for
    dist.destroy_process_group()
    os._exit(0)  # gloo may still have threads, and Python's way out aborts the process over them


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """What each process found."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    torch.multiprocessing.set_forkserver_preload([__name__])  # both are forked from one that has imported torch
    how = {"nprocs": WORLD, "start_method": "forkserver"}
    torch.multiprocessing.start_processes(work, args=(str(folder / "store"), str(folder / "answers")), **how)
    return [torch.load(folder / f"answers.{rank}", weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_outputs_are_those_of_one_process_and_gradients_are_its_mean(
    ranks: list[dict[str, dict[str, Tensor]]], way: str, name: str
) -> None:
    found = [rank[f"{way} {name}"] for rank in ranks]
    model, shares = patched(name), normal(ROWS, 4).chunk(WORLD)
    alone = [copy.deepcopy(model) for _ in range(WORLD)]
    outputs = [trained(one, share) for one, share in zip(alone, shares, strict=True)]
    assert all(torch.equal(rank["output"], output) for rank, output in zip(found, outputs, strict=True))
    whole = copy.deepcopy(model)
    trained(whole, torch.cat(shares))
    assert found[0].keys() == {"output", *dict(model.named_parameters())}
    for key, parameter in model.named_parameters():
        gradients = [dict(one.named_parameters())[key].grad for one in alone]
        mean = (gradients[0].float() + gradients[1].float()) / WORLD
        assert torch.equal(found[0][key], found[1][key])  # synchronised
        assert found[0][key].dtype is parameter.dtype
        undistributed = dict(whole.named_parameters())[key].grad
        assert float((mean - undistributed.float() / WORLD).norm() / mean.norm()) <= 2**-6
        room = 1e-5 if parameter.dtype is torch.float32 else 2**-7  # the reduction itself rounds
        assert float((found[0][key].float() - mean).norm() / mean.norm()) <= room
