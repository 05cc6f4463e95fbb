"""Plans of schemes on unseen data: models trained on real data, three limits each, and twenty fresh sets per plan."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.asked import validate
from auditor.flow import run
from auditor.loading.subject import from_object
from auditor.records.quantization import QuantizedPlan
from auditor.settings import Settings
from tests.support.quantizing import by_hand, change
from tests.support.replaying import Model

pytestmark = pytest.mark.slow

datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed", exc_type=ImportError)

SETS, SIZE = 20, 48
"""Number of fresh sets, and rows in a set; calibration and held-out inputs are one set each."""

SCHEMES = "nvfp4,mxfp4,fp8"
SHARES = (0.7, 0.4, 0.2)
"""The limits: shares of the error with all layers in the scheme with the fewest bits."""


def perceptron(features: int, classes: int) -> nn.Module:
    first = [nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(128, 64), nn.GELU(), nn.Linear(64, classes))


def residual(features: int, classes: int) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.first(x)
        for block in m.blocks:
            x = x + block(x)
        return m.last(x)

    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)) for _ in range(4)]
    parts = {"first": nn.Linear(features, 64), "blocks": nn.ModuleList(blocks), "last": nn.Linear(64, classes)}
    return Model(forward, **parts)


def attention(features: int, classes: int) -> nn.Module:
    """The rows of an image are its tokens."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.first(x.view(len(x), 8, -1))
        x = x + m.out(F.scaled_dot_product_attention(m.q(m.norm(x)), m.k(m.norm(x)), m.v(m.norm(x))))
        return m.last(x.mean(1))

    parts = {name: nn.Linear(64, 64) for name in ("q", "k", "v", "out")}
    return Model(
        forward, first=nn.Linear(features // 8, 64), norm=nn.LayerNorm(64), last=nn.Linear(64, classes), **parts
    )


MODELS: dict[str, tuple[str, Callable[[int, int], nn.Module]]] = {
    "digits, perceptron": ("digits", perceptron),
    "digits, residual": ("digits", residual),
    "digits, attention": ("digits", attention),
    "breast cancer, perceptron": ("breast_cancer", perceptron),
    "breast cancer, residual": ("breast_cancer", residual),
}


def trained(data: str, build: Callable[[int, int], nn.Module]) -> tuple[nn.Module, Tensor]:
    """A model trained on half of the data, padded to 64 features, and the inputs of the other half."""
    bunch = getattr(datasets, f"load_{data}")()
    x = torch.from_numpy(bunch.data).float()
    x = F.pad((x - x.mean(0)) / x.std(0).clamp(min=1e-6), (0, 64 - x.shape[1]))
    y = torch.from_numpy(bunch.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    half = len(x) // 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(64, int(y.max()) + 1)
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        for _ in range(200):
            rows = order[torch.randint(0, half, (64,), generator=generator)]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval().requires_grad_(False), x[order[half:]]


def plans_for(model: nn.Module, calibration: Tensor, held_out: Tensor, budget: float) -> tuple[QuantizedPlan, ...]:
    asked = {"strategies": "cast", "quick": True, "formats": SCHEMES, "max_error": budget}
    subject = replace(from_object(model, calibration, {}), held_out=(((held_out,), {}),))
    return run(subject, validate(Settings, asked)).quantized_plans


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_nineteen_of_twenty_fresh_sets_are_within_the_limit(name: str, share: float) -> None:
    model, x = trained(*MODELS[name])
    calibration, held_out, rest = x[:SIZE], x[SIZE : 2 * SIZE], x[2 * SIZE :]
    layers = {path: "mxfp4" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    budget = share * change(model, by_hand(model, layers), calibration)
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randperm(len(rest), generator=generator)[:SIZE] for _ in range(SETS)]
    quantized = 0
    for plan in plans_for(model, calibration, held_out, budget):
        other = by_hand(model, plan.layers)
        errors = [change(model, other, rest[draw]) for draw in draws]
        within = sum(error <= budget for error in errors)
        print(f"{name}, {plan.name}: {plan.effective_bits:.2f} bits, {within} of {SETS}, {plan.error / budget:.2f}")
        assert within >= SETS - 1, plan.name
        quantized += any(plan.layers.values())
    assert quantized
