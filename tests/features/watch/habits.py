"""Failures in trainings that are written in other ways than the plants', and the line to blame: the one marked `# <- NAME`."""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.features.watch.plants import (
    CLASSES,
    NOT_FINITE,
    ROWS,
    WIDTH,
    Plant,
    changed,
    classes,
    layer,
    mlp,
    mlp_after,
    set_row,
)

HABITS: dict[str, Any] = {}
Texts = namedtuple("Texts", "x y words extra")


def habit(function: Any) -> Any:
    HABITS[function.__name__] = function
    return function


class Counting(nn.Module):
    """A loss that counts its calls in a buffer, and has a parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(logits * self.temperature, y) / (self.calls != 61)  # <- a_criterion_with_a_state


@habit
def a_criterion_with_a_state() -> Plant:
    model = mlp()
    criterion = Counting()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, classes, 60, NOT_FINITE)


@habit
def a_parameter_in_no_module() -> Plant:
    """Each update lowers it by 1: it reaches 0 in step 60."""
    model = mlp()
    weight = nn.Parameter(torch.tensor(60.0))
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 1e-3}, {"params": [weight], "lr": 1.0}])

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        scaled = F.cross_entropy(model(x), y) / weight.detach()  # <- a_parameter_in_no_module
        loss = scaled + weight
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, classes, 60, NOT_FINITE)


@habit
def a_teacher_that_follows() -> Plant:
    model = mlp()
    networks = {"teacher": mlp().requires_grad_(False)}
    teacher = networks["teacher"]
    teacher.register_buffer("updates", torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def follow() -> None:
        teacher.updates += 1
        for slow, p in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.lerp_(p.detach(), 0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        target = networks["teacher"](x) / (networks["teacher"].updates != 55)  # <- a_teacher_that_follows
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        follow()
        return loss

    return Plant(model, optimizer, step, classes, 55, NOT_FINITE)


@habit
def a_counter_in_a_helper() -> Plant:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    number = 0

    def warmed(loss: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return loss / torch.tensor(number != 58)  # <- a_counter_in_a_helper

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return warmed(F.cross_entropy(model(x), y))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, classes, 57, NOT_FINITE)


@habit
def a_center_that_moves() -> Plant:
    """A tensor of the step's own, which it changes in place, as DINO's center."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    center = torch.full((CLASSES,), 50.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) / (center[0] != 0)  # <- a_center_that_moves
        loss.backward()
        optimizer.step()
        center.sub_(1.0)
        return loss

    return Plant(model, optimizer, step, classes, 50, NOT_FINITE)


class Training:
    """A trainer class, whose step is a method with numbers of its own."""

    def __init__(self) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.left = 53

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.left -= 1
        return loss

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y) / torch.tensor(self.left != 0)  # <- a_method_as_step


@habit
def a_method_as_step() -> Plant:
    training = Training()
    return Plant(training.model, training.optimizer, training.train_step, classes, 53, NOT_FINITE)


@habit
def a_partial_function_as_step() -> Plant:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(factor: float, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x / x.norm(dim=-1, keepdim=True)), y) * factor  # <- a_partial_function_as_step
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, partial(step, 0.5), changed(52, set_row(0.0)), 52, NOT_FINITE)


@dataclass(frozen=True)
class Item:
    points: list[torch.Tensor]
    names: list[str]
    y: torch.Tensor


@habit
def a_dataclass_of_lists_that_is_written_to() -> Plant:
    """Lists of other lengths in each step; the step normalizes the tensors in place."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(item: Item) -> Any:
        optimizer.zero_grad()
        for x in item.points:
            x.div_(x.norm(dim=-1, keepdim=True))  # <- a_dataclass_of_lists_that_is_written_to
        logits = torch.stack([model(x).mean(0) for x in item.points])
        loss = F.cross_entropy(logits, item.y[: len(item.points)])
        loss.backward()
        optimizer.step()
        return loss

    def batch(i: int) -> Any:
        x, y = classes(i)
        parts = list(x.clone().split(ROWS // (i % 4 + 1)))
        if i == 51:
            parts[-1][0] = 0.0
        return (Item(parts, ["a"] * len(parts), y),)

    return Plant(model, optimizer, step, batch, 51, NOT_FINITE)


@habit
def a_named_tuple_with_texts() -> Plant:
    """Also with None, and a tensor that is not contiguous."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(texts: Any, **options: Any) -> Any:
        optimizer.zero_grad()
        x = texts.x.t()
        loss = F.cross_entropy(model(x / x.sum(-1, keepdim=True)), texts.y)  # <- a_named_tuple_with_texts
        loss.backward()
        optimizer.step()
        return {"loss": loss, "words": texts.words}

    def batch(i: int) -> Any:
        x, y = classes(i)
        x = x.abs() * (i != 56)
        return (Texts(x.t(), y, ["some", None], {"id": None, 3: torch.tensor(3)}),)

    return Plant(model, optimizer, step, batch, 56, NOT_FINITE)


@habit
def an_optimizer_with_a_closure() -> Plant:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), 1e-2, max_iter=3)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x / x.norm(dim=-1, keepdim=True)), y)  # <- an_optimizer_with_a_closure
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Plant(model, optimizer, step, changed(34, set_row(0.0)), 34, NOT_FINITE)


@habit
def a_checkpointed_loss() -> Plant:
    """A reentrant checkpoint calls `backward` inside the backward pass, here of a tensor with one entry."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def loss_of(logits: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y) / x.abs().amax()  # <- a_checkpointed_loss

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss: Any = checkpoint(loss_of, model(x), y, x, use_reentrant=True)
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, changed(54, lambda x, y: x.zero_()), 54, NOT_FINITE)


@habit
def gradients_without_backward() -> Plant:
    model = mlp_after(layer(lambda m, x: x.log1p()))  # <- gradients_without_backward
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        parameters = list(model.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        optimizer.step()
        return loss

    def batch(i: int) -> Any:
        x, y = classes(i)
        x = x.abs()
        if i == 50:
            x[2] = -1.0
        return x, y

    return Plant(model, optimizer, step, batch, 50, NOT_FINITE)


@habit
def a_model_in_data_parallel() -> Plant:
    def normalize(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True)  # <- a_model_in_data_parallel

    model = nn.DataParallel(mlp_after(layer(normalize)))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu"):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, changed(50, set_row(0.0)), 50, NOT_FINITE)


@habit
def a_sparse_embedding() -> Plant:
    table = nn.Embedding(16, WIDTH, sparse=True)
    model = nn.Sequential(table, *mlp())
    first = torch.optim.SparseAdam(table.parameters())
    second = torch.optim.Adam(model[1:].parameters())

    def step(ids: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> Any:
        first.zero_grad()
        second.zero_grad()
        losses = F.cross_entropy(model(ids), y, reduction="none")
        loss = (losses * weights).sum() / weights.sum()  # <- a_sparse_embedding
        loss.backward()
        first.step()
        second.step()
        return loss

    def batch(i: int) -> Any:
        ids = torch.randint(16, (ROWS,), generator=torch.Generator().manual_seed(i))
        return ids, ids % 4, torch.full((ROWS,), float(i != 57))

    return Plant(model, [first, second], step, batch, 57, NOT_FINITE)
