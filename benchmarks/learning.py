"""Examples that learn: fresh models, real data, and training loops in FP32, FP16 and BF16 under CUDA's autocast rules."""

from __future__ import annotations

import importlib.util
import inspect
import pydoc_data.topics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from auditor.artefact.applying import apply_plan
from auditor.artefact.runtime import DTYPES
from auditor.emulation.emulate import emulate
from auditor.numerics.casting import round_to
from auditor.records import Objective, Subject
from benchmarks.trained_models import sentence_encoder

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BATCH, LENGTH = 32, 64
MODULES = (
    "argparse",
    "ast",
    "asyncio",
    "inspect",
    "logging",
    "math",
    "shutil",
    "ssl",
    "statistics",
    "tarfile",
    "typing",
)
"""Modules of Python whose docstrings are told apart."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model class of the examples, how its loss is made, and batches to train on. rate: learning rate of AdamW."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Callable[[int], Iterator[Batch]]
    rate: float


def task(name: str) -> Task:
    """01_digits_attention, 03_handwritten_transformer or 04_digits_resnet, from scratch; minilm_l6, from its package's weights."""
    if name == "minilm_l6":
        return Task(name, Topics, nn.functional.cross_entropy, _docstrings, 5e-5)
    module = _module(name)
    if name.startswith("03"):
        return Task(name, lambda: module.CharacterLM(depth=2), next_character, _text(module), 2e-3)
    kind = {"01_digits_attention": "DigitTransformer", "04_digits_resnet": "ResNet"}[name]
    return Task(name, getattr(module, kind), nn.functional.cross_entropy, _digits, 1e-3)


def next_character(logits: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"learning_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digits(seed: int) -> Iterator[Batch]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, torch.tensor(bunch.target)
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(images), (BATCH,), generator=generator)
        yield images[rows], labels[rows]


def _text(module: ModuleType) -> Callable[[int], Iterator[Batch]]:
    text = module.encode("\n\n".join(body for _, body in sorted(pydoc_data.topics.topics.items())))

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - LENGTH, (BATCH // 4, 1), generator=generator)
            windows = text[starts + torch.arange(LENGTH + 1)]
            yield windows[:, :-1], windows[:, 1:]

    return batches


class Topics(nn.Module):
    """A sentence encoder, its table of words frozen, with a new layer that says which module a docstring is from.

    Token ids [n, t] -> [n, modules].
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, _ = sentence_encoder()
        self.encoder.embeddings.word_embeddings.requires_grad_(False)
        self.head = nn.Linear(384, len(MODULES))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(ids, (ids != 0).long()).pooler_output)


def _docstrings(seed: int) -> Iterator[Batch]:
    _, tokens = sentence_encoder()
    known = [
        (text, label)
        for label, name in enumerate(MODULES)
        for one in vars(importlib.import_module(name)).values()
        if callable(one) and str(getattr(one, "__module__", "")).startswith(name) and (text := inspect.getdoc(one))
    ]
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = [known[i] for i in torch.randint(len(known), (BATCH // 8,), generator=generator).tolist()]
        ids, _ = tokens(*(text for text, _ in rows))
        yield ids, torch.tensor([label for _, label in rows])


def fresh(learning: Task, seed: int) -> nn.Module:
    """The model with random weights, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return learning.model().train()


def subject_of(learning: Task, model: nn.Module, batch: Batch) -> Subject:
    objective = Objective(learning.loss, (((batch[1],), {}),), learning.name)
    return Subject(model, (((batch[0],), {}),), learning.name, "", "", "", objective=objective)


@dataclass
class Loop:
    """A training loop. losses: of every step; skipped: steps that GradScaler skipped; lost: shares of updates that
    rounding the weights took back, where they are stored in BF16."""

    learning: Task
    model: nn.Module
    format: str
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    seed: int
    stored: str = "fp32"
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    lost: list[float] = field(default_factory=list)

    def run(self, steps: int, each: Callable[[int, Batch], None] = lambda step, batch: None) -> Loop:
        """`each` is called before every step, with its number and batch."""
        batches = self.learning.batches(self.seed)
        for step, batch in zip(range(steps), batches, strict=False):
            each(step, batch)
            self._step(step, batch)
        return self

    def _step(self, step: int, batch: Batch) -> None:
        inputs, targets = batch
        with torch.random.fork_rng(devices=[]), _as_on_cuda(self.format):
            torch.manual_seed(1000 * self.seed + step)
            with torch.autocast("cuda", dtype=DTYPES[self.format], enabled=self.format != "fp32"):
                loss = self.learning.loss(self.model(inputs), targets)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
        before, scale = [p.detach().clone() for p in self.model.parameters()], self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(float(loss.detach()))
        self.skipped += int(self.scaler.is_enabled() and self.scaler.get_scale() < scale)
        if self.stored == "bf16":
            self._store(before)

    def _store(self, before: list[Tensor]) -> None:
        lost = moved = 0
        with torch.no_grad():
            for old, parameter in zip(before, self.model.parameters(), strict=True):
                changed = parameter != old
                parameter.copy_(round_to(parameter, "bf16"))
                moved += int(changed.sum())
                lost += int((changed & (parameter == old)).sum())
        self.lost.append(lost / max(moved, 1))


def loop(
    learning: Task,
    seed: int,
    format: str,
    *,
    plan: dict[str, Any] | None = None,
    scale: float | None = None,
    stored: str = "fp32",
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    interval: int = 2000,
) -> Loop:
    """A loop in `format` under plain autocast, or of the model patched with `plan`; scale: of GradScaler, None: none."""
    model = fresh(learning, seed)
    if stored == "bf16":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(round_to(parameter, "bf16"))
    if plan is not None:
        apply_plan(model, plan)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=learning.rate))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=interval, enabled=scale is not None)
    return Loop(learning, model, format, make(list(model.parameters())), scaler, seed, stored)


@contextmanager
def _as_on_cuda(format: str) -> Iterator[None]:
    if format == "fp32":
        yield
        return
    with emulate("cuda"):
        yield
