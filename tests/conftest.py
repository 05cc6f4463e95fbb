"""What every test needs: importable torchvision, child processes that find the package, and visible skips."""

import gc
import os
import runpy
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STUBS = Path(__file__).resolve().parent / "stubs"

runpy.run_path(str(STUBS / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STUBS), os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Tests are of the emulation, and see no GPU, unless those that need one are asked for: `-m gpu`."""
    markers = config.getoption("markexpr")
    if "gpu" not in markers.split() or "not gpu" in markers:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What the slow tests import takes seconds, in each process of the quick ones."""
    return (collection_path.name == "slow" and config.getoption("markexpr") == "not slow") or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector does not traverse torch and thousands of tests again and again: they stay to the end."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Weights that a module of tests draws when it is imported are the same in every run."""
    if isinstance(collector, pytest.Module):
        seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Weights that a test or its fixtures draw are the same in every run and in every order of tests."""
    seed()


def seed() -> None:
    """Seed torch, which otherwise starts each process with a seed of its own.

    `torch.manual_seed` would format pytest's whole call stack several times, before each of thousands of tests."""
    import torch

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    from tests.browser.devtools import find_chromium

    gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    browser = pytest.mark.skipif(not find_chromium(), reason="no Chromium: install it, or set CHROMIUM to its path")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(gpu)
        if "browser" in item.keywords:
            item.add_marker(browser)


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return ROOT


@pytest.fixture(scope="session", autouse=hasattr(os, "fork"))
def _forked() -> Iterator[None]:
    """The processes that verify plans need not import torch, each anew."""
    from tests.support.template import forking

    with forking():
        yield


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A group of this process alone, so that collectives can be traced and run."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, made the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
