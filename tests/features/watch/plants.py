"""Failures planted in small trainings, and the line to blame for each: the one marked `# <- NAME`."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, CLASSES = 16, 8, 4


@dataclass
class Plant:
    """A training: `step(*batch(i))` for each i below `steps`; something goes wrong at or after step `at`. kinds: of
    the capsule, one of them."""

    model: Any
    optimizer: Any
    step: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    at: int
    kinds: tuple[str, ...]
    scaler: Any = None
    steps: int = 0
    others: list[Any] = field(default_factory=list)


PLANTS: dict[str, Callable[[], Plant]] = {}


def plant(function: Callable[[], Plant]) -> Callable[[], Plant]:
    PLANTS[function.__name__] = function
    return function


def lines_of(name: str, file: str = __file__) -> set[str]:
    """The lines with the mark of a plant, as `plants.py:24`."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines()
    return {f"{path.name}:{i}" for i, text in enumerate(lines, 1) if text.endswith(f"# <- {name}")}


NOT_FINITE = ("loss-not-finite", "gradients-not-finite")


def mlp(*middle: nn.Module, out: int = CLASSES, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), *middle, nn.Linear(width, out))


def classes(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator)


def changed(at: int, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[int], Any]:
    """Batches of which one is changed in place."""

    def batch(i: int) -> Any:
        x, y = classes(i)
        if i == at:
            change(x, y)
        return x, y

    return batch


def set_row(value: float) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def change(x: torch.Tensor, y: torch.Tensor) -> None:
        x[3] = value

    return change


def set_all_to_zero(x: torch.Tensor, y: torch.Tensor) -> None:
    x.fill_(0.0)


def plain(model: nn.Module, at: int, change: Any, kinds: tuple[str, ...] = NOT_FINITE, rate: float = 1e-3) -> Plant:
    """Cross entropy in FP32, with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), rate)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, changed(at, change), at, kinds)


def low(model: nn.Module, at: int, change: Any, kinds: tuple[str, ...], loss_of: Any = F.cross_entropy) -> Plant:
    """The same under FP16 autocast with a GradScaler."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100_000)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Plant(model, optimizer, step, changed(at, change), at, kinds, scaler)


def layer(function: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module whose forward is a function of (module, x)."""
    kind = type("Layer", (nn.Module,), {"forward": function})
    module: nn.Module = kind()
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            module.register_buffer(name, part)
        else:
            setattr(module, name, part)
    return module


@plant
def nan_labels() -> Plant:
    model = mlp(out=1)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = (model(x).squeeze(-1) - y).square().mean()  # <- nan_labels
        loss.backward()
        optimizer.step()
        return loss

    def batch(i: int) -> Any:
        x, y = classes(i)
        target = y.float()
        target[5] = float("nan") if i == 70 else 0.0
        return x, target

    return Plant(model, optimizer, step, batch, 70, NOT_FINITE)


@plant
def nan_input() -> Plant:
    def first(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2  # <- nan_input

    return plain(mlp_after(layer(first)), 60, set_row(float("nan")))


def mlp_after(first: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, *mlp())


@plant
def zero_norm_of_a_row() -> Plant:
    def normalize(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x / x.square().sum(-1, keepdim=True)  # <- zero_norm_of_a_row

    return plain(mlp_after(layer(normalize)), 80, set_row(0.0))


@plant
def dropout_that_drops_all() -> Plant:
    def pool(m: Any, x: torch.Tensor) -> torch.Tensor:
        mask = m.drop(torch.ones(ROWS, 3))
        weights = mask / mask.sum(-1, keepdim=True)  # <- dropout_that_drops_all
        return x * weights.sum(-1, keepdim=True)

    return plain(mlp(layer(pool, drop=nn.Dropout(0.06))), 10, lambda x, y: None)


@plant
def a_counter_in_a_buffer() -> Plant:
    def decay(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.count += 1
        return x / (66.0 - m.count)  # <- a_counter_in_a_buffer

    return plain(mlp(layer(decay, count=torch.zeros(()))), 65, lambda x, y: None)


@plant
def a_running_scale_in_a_buffer() -> Plant:
    def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.scale.mul_(0.5).add_(0.5 * x.abs().amax())
        return x + torch.exp(m.scale.square())[None] * 1e-30  # <- a_running_scale_in_a_buffer

    return plain(mlp_after(layer(scaled, scale=torch.ones(()))), 75, set_row(40.0))


@plant
def square_root_at_zero_backward() -> Plant:
    def distance(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.inner(x)
        gap = h - h[:, :1]
        return gap.square().sum(1, keepdim=True).sqrt() + m.inner(x)  # <- square_root_at_zero_backward

    return plain(nn.Sequential(layer(distance, inner=nn.Linear(WIDTH, WIDTH, bias=False)), *mlp()), 90, set_row(0.0))


@plant
def power_at_zero_backward() -> Plant:
    def root(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.inner(x).square()
        other = h * 2
        return h.pow(0.5) + other  # <- power_at_zero_backward

    inner = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.constant_(inner.weight, 0.1)

    def positive(i: int) -> Any:
        x, y = classes(i)
        x = x.abs() + 0.1
        if i == 77:
            x[3] = 0.0
        return x, y

    made = plain(nn.Sequential(layer(root, inner=inner), *mlp()), 77, lambda x, y: None, rate=1e-5)
    made.batch = positive
    return made


@plant
def where_that_hides_a_division() -> Plant:
    def safe(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.inner(x)
        return torch.where(h == 0, torch.zeros_like(h), h.sin() / h)  # <- where_that_hides_a_division

    return plain(nn.Sequential(layer(safe, inner=nn.Linear(WIDTH, WIDTH, bias=False)), *mlp()), 55, set_row(0.0))


@plant
def arc_cosine_at_one_backward() -> Plant:
    def angle(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.normalize(m.inner(x), dim=-1)
        cosine = (h * h.detach().roll(0, 0)).sum(-1, keepdim=True).clamp(-1, 1)
        return x + torch.acos(cosine * m.factor)  # <- arc_cosine_at_one_backward

    module = layer(angle, inner=nn.Linear(WIDTH, WIDTH), factor=torch.tensor(0.5))
    return plain(nn.Sequential(module, *mlp()), 60, lambda x, y: module.factor.fill_(1.0))


@plant
def hypotenuse_at_zero_backward() -> Plant:
    def length(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.inner(x)
        return h + torch.hypot(h, h.roll(1, -1))  # <- hypotenuse_at_zero_backward

    inner = nn.Linear(WIDTH, WIDTH, bias=False)
    return plain(nn.Sequential(layer(length, inner=inner), *mlp()), 85, set_row(0.0))


@plant
def two_micro_batches() -> Plant:
    def inverse(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sum(-1, keepdim=True).reciprocal() * x  # <- two_micro_batches

    model = mlp_after(layer(inverse))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(*micro: Any) -> None:
        optimizer.zero_grad()
        for x, y in micro:
            (F.cross_entropy(model(x), y) / len(micro)).backward()
        optimizer.step()

    def batch(i: int) -> Any:
        first, second = classes(2 * i), classes(2 * i + 1)
        if i == 58:
            second[0][2] = 0.0
        return first, second

    return Plant(model, optimizer, step, batch, 58, NOT_FINITE)


@plant
def accumulation_over_calls() -> Plant:
    def logarithm(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sum(-1, keepdim=True).log() + x  # <- accumulation_over_calls

    model = mlp_after(layer(logarithm))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(x: torch.Tensor, y: torch.Tensor, is_last: bool) -> Any:
        loss = F.cross_entropy(model(x), y)
        (loss / 4).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def batch(i: int) -> Any:
        x, y = classes(i)
        if i == 237:
            x[2] = 0.0
        return x, y, i % 4 == 3

    return Plant(model, optimizer, step, batch, 237, NOT_FINITE, steps=248)


def adversarial(change: Any) -> Any:
    generator, critic = mlp(out=WIDTH), mlp(out=1)
    first = torch.optim.Adam(critic.parameters(), 1e-3)
    second = torch.optim.Adam(generator.parameters(), 1e-3)
    return generator, critic, first, second


@plant
def the_second_of_two_optimizers() -> Plant:
    generator, critic, first, second = adversarial(None)

    def step(x: torch.Tensor, gain: float) -> None:
        first.zero_grad()
        fake = generator(x)
        (critic(fake.detach()).sigmoid().mean() - critic(x).sigmoid().mean()).backward()
        first.step()
        second.zero_grad()
        score = (critic(fake) * gain).sigmoid()
        (1 - score).log().mean().backward()  # <- the_second_of_two_optimizers
        second.step()

    def batch(i: int) -> Any:
        return classes(i)[0] + 3, 1e6 if i == 64 else 1.0

    return Plant([generator, critic], [first, second], step, batch, 64, NOT_FINITE)


@plant
def the_first_of_two_optimizers() -> Plant:
    generator, critic, first, second = adversarial(None)

    def step(x: torch.Tensor) -> None:
        first.zero_grad()
        fake = generator(x)
        real = critic(x)
        loss = (critic(fake.detach()) / real.square().mean()).mean() / x.abs().mean()  # <- the_first_of_two_optimizers
        loss.backward()
        first.step()
        second.zero_grad()
        (-critic(fake)).mean().backward()
        second.step()

    def batch(i: int) -> Any:
        x = classes(i)[0]
        return (x * 0 if i == 52 else x,)

    return Plant([generator, critic], [first, second], step, batch, 52, NOT_FINITE)


@plant
def clipping_before_unscaling() -> Plant:
    made = low(mlp(), 0, lambda x, y: None, ("clipped-while-scaled", "updates-lost"))
    model, optimizer, scaler = made.model, made.optimizer, made.scaler

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- clipping_before_unscaling
        scaler.step(optimizer)
        scaler.update()
        return loss

    made.step = step
    made.steps = 60
    return made


@plant
def bf16_weights_that_no_longer_change() -> Plant:
    model = mlp(width=32).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-1)

    def step(x: torch.Tensor, y: torch.Tensor, rate: float) -> Any:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()  # <- bf16_weights_that_no_longer_change
        return loss

    def batch(i: int) -> Any:
        x, y = classes(i)
        return x.repeat(1, 4).bfloat16(), y, 0.1 if i < 60 else 1e-3

    return Plant(model, optimizer, step, batch, 60, ("updates-lost",), steps=120)


@plant
def logarithm_of_zero_in_fp32() -> Plant:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor, gain: float) -> Any:
        optimizer.zero_grad()
        probabilities = (model(x) * gain).softmax(-1)
        chosen = probabilities.gather(1, y[:, None])
        loss = -chosen.log().mean()  # <- logarithm_of_zero_in_fp32
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, lambda i: (*classes(i), 1e4 if i == 99 else 1.0), 99, NOT_FINITE)


@plant
def exponential_in_fp32() -> Plant:
    def gate(m: Any, x: torch.Tensor) -> torch.Tensor:
        grown = x.exp()  # <- exponential_in_fp32
        return x * grown / (1 + grown)

    return plain(mlp_after(layer(gate)), 61, set_row(100.0))


@plant
def attention_scores_in_fp16() -> Plant:
    def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.T  # <- attention_scores_in_fp16
        return scores.softmax(-1) @ x

    return low(mlp_after(layer(attend)), 73, set_row(200.0), ("loss-not-finite", "skipped"))


@plant
def squares_in_fp16() -> Plant:
    def normalize(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.inner(x)
        squares = h * h  # <- squares_in_fp16
        return h + (squares - squares.mean(-1, keepdim=True)).clamp(-1, 1)

    inner = nn.Linear(WIDTH, WIDTH)
    return low(mlp_after(layer(normalize, inner=inner)), 66, set_row(3000.0), ("loss-not-finite", "skipped"))


@plant
def a_linear_layer_in_fp16() -> Plant:
    def wide(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.inner(x)  # <- a_linear_layer_in_fp16

    inner = nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(inner.weight, 0.5)
    return low(mlp_after(layer(wide, inner=inner)), 83, set_row(6e4), ("loss-not-finite", "skipped"))


@plant
def a_backward_pass_in_fp16() -> Plant:
    def steep(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.inner(x)
        return (h * m.gain) / m.gain.float()  # <- a_backward_pass_in_fp16

    module = layer(steep, inner=nn.Linear(WIDTH, WIDTH), gain=torch.ones((), dtype=torch.float16))

    def change(x: torch.Tensor, y: torch.Tensor) -> None:
        module.gain.fill_(1e-7)

    return low(mlp_after(module), 57, change, ("skipped", *NOT_FINITE))


@plant
def gradients_flushed_without_a_scaler() -> Plant:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-1)

    def step(x: torch.Tensor, y: torch.Tensor, weight: float) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits, y) * weight  # <- gradients_flushed_without_a_scaler
        loss.backward()
        optimizer.step()
        return loss

    def batch(i: int) -> Any:
        return *classes(i), 1e-7 if i >= 54 else 1.0

    return Plant(model, optimizer, step, batch, 54, ("gradients-flushed",), steps=110)


@plant
def a_mask_without_entries() -> Plant:
    model = mlp(out=1)
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: dict[str, torch.Tensor]) -> Any:
        optimizer.zero_grad()
        errors = (model(batch["x"]).squeeze(-1) - batch["y"]).square()
        loss = (errors * batch["mask"]).sum() / batch["mask"].sum()  # <- a_mask_without_entries
        loss.backward()
        optimizer.step()
        return loss

    def batch(i: int) -> Any:
        x, y = classes(i)
        return ({"x": x, "y": y.float(), "mask": (y > 0).float() * (i != 71)},)

    return Plant(model, optimizer, step, batch, 71, NOT_FINITE)


@plant
def a_row_that_is_masked_wholly() -> Plant:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = (x @ x.T).masked_fill(mask, float("-inf"))
            return self.inner(scores.softmax(-1) @ x)  # <- a_row_that_is_masked_wholly

    model = Attention()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, mask), y)
        loss.backward()
        optimizer.step()
        return loss

    def batch(i: int) -> Any:
        mask = torch.ones(ROWS, ROWS).triu(1).bool()
        if i == 62:
            mask[4] = True
        return *classes(i), mask

    return Plant(model, optimizer, step, batch, 62, NOT_FINITE)


class Inverse(torch.autograd.Function):
    """Its backward divides by its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # <- a_backward_by_hand
        (x,) = ctx.saved_tensors
        return gradient * x / x.abs()  # <- a_backward_by_hand


@plant
def a_backward_by_hand() -> Plant:
    def absolute(m: Any, x: torch.Tensor) -> torch.Tensor:
        return Inverse.apply(m.inner(x))  # type: ignore[no-any-return, no-untyped-call] # <- a_backward_by_hand

    inner = nn.Linear(WIDTH, WIDTH, bias=False)
    return plain(mlp_after(layer(absolute, inner=inner)), 59, set_row(0.0))


@plant
def a_checkpointed_block() -> Plant:
    def block(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.inner(x)
        return h / h.abs().sum(-1, keepdim=True)  # <- a_checkpointed_block

    def outer(m: Any, x: torch.Tensor) -> Any:
        return checkpoint(m.block, x, use_reentrant=False)

    inner = layer(block, inner=nn.Linear(WIDTH, WIDTH, bias=False))
    return plain(mlp_after(layer(outer, block=inner)), 68, set_row(0.0))


@plant
def a_draw_of_pythons_random() -> Plant:
    def augment(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x / random.choice((1.0, 1.0, 2.0, 2.0, 4.0) * 8 + (0.0,))  # <- a_draw_of_pythons_random

    return plain(mlp_after(layer(augment)), 5, lambda x, y: None)


@plant
def a_generator_of_the_user() -> Plant:
    rng = torch.Generator().manual_seed(4)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        keep = torch.rand(x.shape[0], generator=rng) > 0.78
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = (losses * keep).sum() / keep.sum()  # <- a_generator_of_the_user
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, classes, 5, NOT_FINITE, steps=300)


@plant
def a_step_that_raises() -> Plant:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        scale = x.amax() - x.amin()
        loss = F.cross_entropy(model(x / scale), y)  # <- a_step_that_raises
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, changed(63, set_all_to_zero), 63, ("raised",))


@plant
def a_step_that_skips_by_hand() -> Plant:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        scale = x.amax() - x.amin()
        loss = F.cross_entropy(model(x / scale), y)  # <- a_step_that_skips_by_hand
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        return loss

    batch = changed(63, set_all_to_zero)
    return Plant(model, optimizer, step, batch, 63, ("loss-not-finite",), steps=66)


@plant
def a_schedule_that_divides_by_zero() -> Plant:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(x: torch.Tensor, y: torch.Tensor, rate: float) -> Any:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()  # <- a_schedule_that_divides_by_zero
        return loss

    def batch(i: int) -> Any:
        return *classes(i), float("nan") if i == 56 else 1e-2

    return Plant(model, optimizer, step, batch, 56, ("rate-not-finite",))


@plant
def a_normalization_without_eps() -> Plant:
    def normalize(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.inner(x)
        return F.layer_norm(h, (WIDTH,), eps=0.0)  # <- a_normalization_without_eps

    inner = nn.Linear(WIDTH, WIDTH, bias=False)
    return plain(mlp_after(layer(normalize, inner=inner)), 78, set_row(0.0))


@plant
def a_batch_that_the_step_writes_to() -> Plant:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        x.div_(x.norm(dim=-1, keepdim=True))  # <- a_batch_that_the_step_writes_to
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, changed(53, set_row(0.0)), 53, NOT_FINITE)


@plant
def a_scale_that_collapses() -> Plant:
    def wide(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.inner(x) * m.gain  # <- a_scale_that_collapses

    module = layer(wide, inner=nn.Linear(WIDTH, WIDTH), gain=torch.ones(()))

    def change(x: torch.Tensor, y: torch.Tensor) -> None:
        module.gain.fill_(2e5)

    made = low(mlp_after(module), 60, change, ("loss-not-finite", "skipped", "scale-collapsed"))
    made.steps = 72
    return made


class Cooling(nn.Module):
    """Counts its calls in an attribute, and has a part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        temperature = 1 - self.calls / 59
        return self.drop(self.inner(x)) / temperature  # <- a_counter_in_an_attribute


@plant
def a_counter_in_an_attribute() -> Plant:
    return plain(mlp_after(Cooling()), 58, lambda x, y: None)


@plant
def a_counter_of_the_steps_file() -> Plant:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    number = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        nonlocal number
        number += 1
        optimizer.zero_grad()
        is_on = torch.tensor(float(number != 60))
        loss = F.cross_entropy(model(x), y) / is_on  # <- a_counter_of_the_steps_file
        loss.backward()
        optimizer.step()
        return loss

    return Plant(model, optimizer, step, classes, 59, NOT_FINITE)


@plant
def a_spike_of_the_data() -> Plant:
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).squeeze(-1), y.float())
        loss.backward()
        optimizer.step()
        return loss

    batch = changed(69, lambda x, y: x.mul_(1000.0))
    return Plant(model, optimizer, step, batch, 69, ("loss-spike", "gradient-spike"))
