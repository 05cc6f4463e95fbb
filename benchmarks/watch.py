"""Cost of `auditor.watch` in a training: CPU time and memory, beside the bare loop.

    python benchmarks/watch.py

Nine repeats of each model: the same steps bare and watched in turn, each with a model of its own. The ratio is that of the CPU
times of the median step; the table has the median and the range of nine. Memory is that of all live tensors.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import auditor

REPEATS, STEPS = 9, 8
RESULT = Path(__file__).parent / "results" / "watch.md"

Step = Callable[..., Any]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 192)
        layer = nn.TransformerEncoderLayer(192, 4, 768, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(192, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        blocks: list[nn.Module] = []
        for i, o in ((3, 32), (32, 64), (64, 128)):
            blocks += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(128 * 16, 10))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))


def tokens(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(1000, (4, 64), generator=torch.Generator().manual_seed(i))
    return x, x.roll(-1, 1).reshape(-1)


def images(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(16, 3, 32, 32, generator=generator), torch.randint(10, (16,), generator=generator)


def series(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(16, 24, 64, generator=generator), torch.randint(10, (16,), generator=generator)


def rows(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(512, 512, generator=generator), torch.randint(10, (512,), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "transformer": (Transformer, tokens),
    "convolutions, batch normalization": (Convolutions, images),
    "LSTM": (Recurrent, series),
    "perceptron, batch of 512": (Perceptron, rows),
}


def make(kind: Callable[[], nn.Module], folder: str | None) -> tuple[Step, Any]:
    """A step, and its recorder if there is a folder for capsules."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    recorder = auditor.watch(model, optimizer, folder=folder) if folder else None

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y)
        loss.backward()
        optimizer.step()
        return loss

    return (step if recorder is None else recorder.step(step)), recorder


def cpu_times(bare: Step, watched: Step, batch: Callable[[int], Any], start: int) -> tuple[float, float]:
    """Seconds of CPU time of the median of STEPS steps of each, in turn; the batches are made before."""
    times: dict[Step, list[float]] = {bare: [], watched: []}
    for number in range(STEPS):
        one = batch(start + number)
        for step in (bare, watched) if number % 2 else (watched, bare):
            begun = time.process_time()
            step(*one)
            times[step].append(time.process_time() - begun)
    return statistics.median(times[bare]), statistics.median(times[watched])


def live_bytes(kind: Callable[[], nn.Module], batch: Callable[[int], Any], folder: str | None) -> int:
    """Bytes of all tensors that are alive after ten steps, whose last batch is no longer used."""
    gc.collect()
    before = _live()
    step, recorder = make(kind, folder)
    for i in range(10):
        step(*batch(i))
    gc.collect()
    bytes = _live() - before
    if recorder is not None:
        recorder.close()
    return bytes


def _live() -> int:
    storages = {}
    for x in gc.get_objects():
        if issubclass(type(x), torch.Tensor):
            storage = x.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
            if x.is_leaf and x.grad is not None:
                storages[x.grad.untyped_storage()._cdata] = x.grad.untyped_storage().nbytes()
    return sum(storages.values())


def measure(name: str, folder: str) -> str:
    """A row of the table."""
    kind, batch = MODELS[name]
    extra = live_bytes(kind, batch, folder) - live_bytes(kind, batch, None)
    of_batch = sum(x.nbytes for x in batch(0))
    bare, _ = make(kind, None)
    watched, recorder = make(kind, folder)
    cpu_times(bare, watched, batch, 0)
    other, _ = make(kind, None)
    cpu_times(bare, other, batch, 0)
    times, control = [], []
    for repeat in range(REPEATS):
        times.append(cpu_times(bare, watched, batch, 100 * repeat))
        control.append(cpu_times(bare, other, batch, 100 * repeat))
    assert not recorder.is_off
    recorder.close()
    ratios = sorted(second / first for first, second in times)
    noise = statistics.median(second / first for first, second in control)
    milliseconds = 1000 * statistics.median(one for one, _ in times)
    spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
    kib = f"{extra / 1024:.0f} KiB", f"{of_batch / 1024:.0f} KiB"
    found = f"{statistics.median(ratios):.3f} | {spread} | {noise:.3f}"
    return f"| {name} | {milliseconds:.0f} ms | {found} | {kib[0]} | {kib[1]} |"


def main() -> None:
    """Measure all models, and write the page of results."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        table = [measure(name, folder) for name in MODELS]
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread"
    lines = [
        "# Cost of watching a training",
        "",
        "`python benchmarks/watch.py`: CPU time of the median step, bare and watched in turn, nine repeats of "
        f"{STEPS} steps ({machine}; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} processors). Every 25th update is also "
        "sampled for lost updates and flushed gradients, which takes 1 to 2 ms. Memory: of all live tensors after ten steps, "
        "beyond those of the bare loop. Bare / bare: the same ratio of two bare loops, the noise of this machine.",
        "",
        "| model | step | ratio, median | range of nine | bare / bare | memory | one batch |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *table,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
