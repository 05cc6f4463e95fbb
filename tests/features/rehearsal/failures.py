"""Steps that fail, or whose loss is wrong, each with the operation and the line to blame, which has the mark "# <-"."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.features.rehearsal.cases import Made, classes, mlp

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Failure:
    """make: the step and its batches. recipe: whose failure is judged. blamed: the first words of the operation to name.
    marked: whose source has the marked line, if not that of `make`."""

    make: Callable[[], Made]
    recipe: str
    blamed: str
    marked: Any = None


NAN_LOSS: dict[str, Failure] = {}
IN_FP32: dict[str, Failure] = {}
OF_STATE: dict[str, Failure] = {}
TOO_GOOD: dict[str, Failure] = {}


def failure(
    kind: dict[str, Failure], blamed: str, recipe: str = "fp16_autocast", marked: Any = None
) -> Callable[..., Any]:
    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        kind[make.__name__] = Failure(make, recipe, blamed, marked)
        return make

    return keep


def trained(model: nn.Module, loss_fn: Loss, lr: float = 1e-3, **how: Any) -> Callable[..., Any]:
    """loss_fn(model, x, y) -> the loss, or (loss to differentiate, value to return)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **how)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_fn(model, x, y)
        loss, returned = loss if isinstance(loss, tuple) else (loss, loss)
        loss.backward()
        optimizer.step()
        return returned.detach()

    return step


# A loss that is NaN, with finite gradients.


@failure(NAN_LOSS, "mul")
def an_unused_head_times_zero() -> Made:
    """Multiplied by zero so that DistributedDataParallel sees a use of each parameter."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": mlp(16, 8), "used": nn.Linear(8, 4), "unused": nn.Linear(8, 4)})

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = m.body(x)
        loss = F.cross_entropy(m.used(hidden), y)
        distances = m.unused(hidden) * 6e4 * 4  # <-
        return loss + 0.0 * distances.sum()

    return trained(model, loss_fn), classes(3)


@failure(NAN_LOSS, "matmul")
def a_clamp_that_passes_nan_on() -> Made:
    """Off the diagonal, two infinite products cancel to NaN; the gradient of a clamp is zero there."""

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        loss = F.cross_entropy(z, y)
        z = z * 1000
        products = z @ z.T  # <-
        asymmetry = products - products.T
        return loss + asymmetry.clamp(0.0, 1.0).mean()

    model = mlp(16, 4)
    return trained(model, loss_fn), classes(3)


@failure(NAN_LOSS, "mul")
def a_mask_that_multiplies_what_overflows() -> Made:
    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        scores = z * 3e5  # <-
        kept = torch.zeros_like(scores)
        kept[:, 0] = 1e-5
        near = scores.detach().abs() < 1.0
        return F.cross_entropy(z, y) + (scores * kept * near).sum()

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(NAN_LOSS, "div")
def a_weighted_mean_whose_weights_underflow() -> Made:
    """The returned value alone is 0 / 0 in FP16."""

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = m(x)
        loss = F.cross_entropy(z, y)
        with torch.no_grad():
            weights = (z * 0 + 1e-5) * 1e-4
            mean = (weights * z)[0].mean() / weights[0].mean()  # <-
        return loss, loss.detach() + mean

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(NAN_LOSS, "mul", "as_written")
def a_running_loss_in_fp16() -> Made:
    """The step returns a sum of losses in FP16, which overflows in the second step."""
    model = mlp(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    sums = {"total": torch.zeros((), dtype=torch.float16)}

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        sums["total"] = sums["total"] + loss.detach().half()
        hundreds = sums["total"] * 30000  # <-
        return hundreds - hundreds

    return step, classes(3)


# A step that fails in FP32 too.


@failure(IN_FP32, "log")
def the_logarithm_of_zero() -> Made:
    """Inf first, and NaN only where it is multiplied by zero."""

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p = F.softmax(m(x) * 1e4, dim=-1)
        logs = p.log()  # <-
        return -(F.one_hot(y, 4) * logs).sum(-1).mean()

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(IN_FP32, "the backward pass of sqrt")
def the_root_of_zero() -> Made:
    """A norm by hand of a vector that is zero: Inf in the backward pass, and NaN in that of the square."""

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        apart = z - z.detach()
        norms = (apart * apart).sum(-1)
        return F.cross_entropy(z, y) + norms.sqrt().mean()  # <-

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(IN_FP32, "exp")
def an_exponential_that_is_never_nan() -> Made:
    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        wide = (z * 50).clamp(min=100)
        return torch.exp(wide).mean()  # <-

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(IN_FP32, "div")
def the_mean_of_nothing() -> Made:
    """Labels that are NaN are masked as they should be; the mask is empty."""
    batches = [(x, torch.full((32,), math.nan)) for x, _ in classes(3)]

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        known = ~y.isnan()
        apart = torch.where(known, m(x)[:, 0] - y, 0.0)
        return apart.square().sum() / known.sum()  # <-

    return trained(mlp(16, 4), loss_fn), batches


@failure(IN_FP32, "the batch")
def a_batch_with_nan() -> Made:
    batches = [(x.clone(), y) for x, y in classes(3)]
    batches[1][0][3, 5] = math.nan

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(0)  # <-
        return F.cross_entropy(m(centred), y)

    return trained(mlp(16, 4), loss_fn), batches


@failure(IN_FP32, "softmax")
def a_row_that_attends_to_nothing() -> Made:
    """The mask's -Inf is meant; a row of nothing else gives NaN."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(16, 8), "k": nn.Linear(16, 8), "out": nn.Linear(16, 4)})

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = m.q(x) @ m.k(x).T
        later = torch.ones_like(scores).triu().bool()
        shares = scores.masked_fill(later, -math.inf).softmax(-1)  # <-
        return F.cross_entropy(m.out(shares @ x), y)

    return trained(model, loss_fn), classes(3)


@failure(IN_FP32, "div")
def a_logarithm_of_zero_is_meant_and_another_operation_fails() -> Made:
    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        mask = (torch.arange(4) < 3).float().log()
        shares = (z + mask).softmax(-1)
        gone = shares[:, 3:]
        even = gone / gone.sum(-1, keepdim=True)  # <-
        return F.cross_entropy(z, y) + even.mean()

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(IN_FP32, "the backward pass of pow")
def two_uses_of_which_the_second_fails() -> Made:
    """The gradient of z is a sum over both its uses."""

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        loss = F.cross_entropy(z * 1.0, y)
        still = (z * 0).pow(0.5)  # <-
        return loss + still.sum()

    return trained(mlp(16, 4), loss_fn), classes(3)


# Failures that depend on state that the step itself changes.


class Largest(nn.Module):
    """Divides by the largest value so far, once there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 4)
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / self.largest.clone()
        squares = x * x  # <-
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return self.body(x) + 0 * squares.sum()


@failure(OF_STATE, "mul", marked=Largest)
def a_buffer_that_the_failing_step_changes() -> Made:
    x, y = classes(1)[0]

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x.half() if torch.is_autocast_enabled("cuda") else x
        return F.cross_entropy(m(x), y)

    return trained(Largest(), loss_fn), [(x, y), (x * 300, y), (x, y)]


class Attribute(nn.Module):
    """The same with a tensor that is no buffer, and is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(16, 4)
        self.largest = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.body(x) / self.largest
        products = z @ z.T  # <-
        self.largest = torch.maximum(self.largest, z.detach().float().abs().max())
        return z + products[:, :4]


@failure(OF_STATE, "matmul", marked=Attribute)
def an_attribute_that_the_failing_step_replaces() -> Made:
    x, y = classes(1)[0]
    return trained(Attribute(), lambda m, x, y: F.cross_entropy(m(x), y) * 1e-3), [(x, y), (x * 800, y), (x, y)]


@failure(OF_STATE, "matmul")
def a_queue_in_a_list_of_the_file() -> Made:
    """Only the step in which a value enters the queue for the first time is compared with itself."""
    queue = list[torch.Tensor]()

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        loss = F.cross_entropy(z, y)
        if not queue:
            queue.append(z.detach())
        elif len(queue) == 1:
            queue.append(z.detach() * 100)
            loss = loss + (z * 3e3 @ queue[1].T).mean()  # <-
        return loss

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(OF_STATE, "mul")
def a_counter_in_python() -> Made:
    """A warm-up that multiplies the loss in its third step alone."""
    calls = [0]

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        calls[0] += 1
        factor = 1e6 if calls[0] == 3 else 1.0
        z = z * factor  # <-
        return F.cross_entropy(z, y)

    return trained(mlp(16, 4), loss_fn), classes(4)


@failure(OF_STATE, "matmul")
def an_average_of_weights_that_is_a_teacher() -> Made:
    """The teacher is replaced by its average in each step, in a dict; its products overflow in the second step."""
    model = mlp(16, 4)
    teacher = {"weight": model[0].weight.detach().clone()}

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x)
        wanted = x @ teacher["weight"].T  # <-
        grown = teacher["weight"] * 1000
        teacher["weight"] = grown if grown.abs().max() < 1e6 else torch.zeros_like(grown)
        return F.cross_entropy(z, y) + F.mse_loss(z, wanted) * 1e-6

    return trained(model, loss_fn), classes(4)


@failure(OF_STATE, "rsqrt")
def batch_norm_by_hand_with_a_running_variance() -> Made:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(16, 4)
            self.register_buffer("variance", torch.full((16,), 2e-8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.rsqrt(self.variance.to(x.dtype))  # <-
            self.variance.lerp_(x.detach().float().var(0), 0.5)
            return self.body(x * scale)

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x.half() if torch.is_autocast_enabled("cuda") else x
        return F.cross_entropy(m(x), y)

    return trained(Normalized(), loss_fn), classes(3)


@failure(OF_STATE, "the backward pass of sqrt", "as_written")
def a_root_of_what_underflows_with_a_scaler() -> Made:
    """The scaler reads the gradients, and skips the update."""
    model = mlp(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            small = model(x) * 1e-4
            squares = small * small
            size = squares.sqrt()  # <-
            loss = size.float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step, classes(3)


# A loss that is better than FP32's at the same weights, or otherwise another.


@failure(TOO_GOOD, "sub", "bf16")
def logits_minus_their_largest() -> Made:
    """With an offset of 300, BF16 numbers are 2 apart: the loss by hand is 0 where the largest logit is right."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    with torch.no_grad():
        model.weight.mul_(0.3)

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x) + 300
        total = torch.logsumexp(z, -1)
        own = z.gather(-1, y[:, None])[:, 0]
        apart = total - own  # <-
        return apart.clamp(min=0).mean() ** 2

    return trained(model, loss_fn), classes(3)


@failure(TOO_GOOD, "sub", "bf16_autocast")
def a_variance_by_two_moments() -> Made:
    model = mlp(16, 8)

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x) + 40
        first = (z @ torch.full((8, 1), 1 / 8)).squeeze(-1)
        second = ((z * z) @ torch.full((8, 1), 1 / 8)).squeeze(-1)
        spread = second - first * first  # <-
        return spread.clamp(min=0).mean()

    return trained(model, loss_fn), classes(3)


@failure(TOO_GOOD, "sub", "bf16_autocast")
def distances_by_products() -> Made:
    """x^2 - 2xy + y^2 of near points."""
    model = mlp(16, 8)

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = m(x) + 30
        b = m(x + 0.01) + 30
        norms = (a * a) @ torch.ones(8, 1) + (b * b) @ torch.ones(8, 1)
        products = ((a * b) @ torch.ones(8, 1)) * 2
        apart = norms - products  # <-
        return apart.clamp(min=0).mean()

    return trained(model, loss_fn), classes(3)


@failure(TOO_GOOD, "sub", "bf16_autocast")
def one_plus_a_small_number() -> Made:
    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m(x) * 1e-3
        above = 1 + z * z
        rest = above - 1  # <-
        return rest.float().mean() * 1e6

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(TOO_GOOD, "mul", "fp16_autocast")
def a_square_that_underflows() -> Made:
    """In a regularizer that takes no part in the gradients."""

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = m(x)
        loss = F.cross_entropy(z, y)
        small = z.detach() * 1e-4
        squares = small * small  # <-
        return loss, squares.float().mean() * 1e8

    return trained(mlp(16, 4), loss_fn), classes(3)


@failure(TOO_GOOD, "sub", "bf16_autocast")
def contrastive_by_hand() -> Made:
    """A temperature of 1/100 makes logits of 100, which lie 0.5 apart in BF16."""

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = F.normalize(m(x).float(), dim=-1)
        b = F.normalize(a + 0.17 * torch.ones(64).roll(1) * torch.arange(64).sub(31.5).sign(), dim=-1)
        logits = (a @ b.T) * 100
        rest = logits.logsumexp(-1)
        own = logits.diagonal()
        apart = rest.to(own.dtype) - own  # <-
        return apart.float().mean()

    return trained(mlp(16, 64), loss_fn), classes(3)
