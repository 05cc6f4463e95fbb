"""Experts whose weights are one parameter: measured and quantized one by one, whichever way the model reads them."""

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor import audit
from auditor.numerics.quantize import fake_quantize
from auditor.numerics.schemes import SCHEMES
from auditor.records.audit import Audit
from auditor.reporters import text
from auditor.snippets import snippet
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

WIDTH, WIDE, COUNT = 32, 64, 4


class Experts(nn.Module):
    """A router, and four experts in one parameter, each of another size of values. read: the product with the experts."""

    def __init__(self, read: Callable[[Tensor, Tensor, Tensor], Tensor], sizes: tuple[int, int]) -> None:
        super().__init__()
        self.router, self.head, self.read = nn.Linear(WIDTH, COUNT), nn.Linear(WIDE, WIDTH), read
        scale = torch.tensor([1.0, 4.0, 0.5, 2.0])[:, None, None]
        self.up = nn.Parameter(scale * torch.randn(COUNT, *sizes) / 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort(stable=True)
        return self.head(self.read(x[order], self.up, chosen[order]))


def grouped(x: Tensor, stack: Tensor, chosen: Tensor) -> Tensor:
    ends = torch.bincount(chosen, minlength=COUNT).cumsum(0).int()
    return torch._grouped_mm(x, stack, offs=ends)


def sliced(x: Tensor, stack: Tensor, chosen: Tensor) -> Tensor:
    return sum((chosen == i)[:, None] * (x @ stack[i]) for i in range(COUNT))


READS: Mapping[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "grouped_mm": (grouped, True),
    "grouped_mm of a transposed stack": (lambda x, stack, chosen: grouped(x, stack.mT, chosen), False),
    "bmm of picked experts": (lambda x, stack, chosen: (x[:, None] @ stack[chosen])[:, 0], True),
    "bmm of picked experts on the left": (lambda x, stack, chosen: (stack[chosen] @ x[..., None])[..., 0], False),
    "index_select": (lambda x, stack, chosen: torch.bmm(x[:, None], stack.index_select(0, chosen))[:, 0], True),
    "slices": (sliced, True),
    "linear layers of slices": (lambda x, stack, chosen: sliced(x, stack.mT, chosen), False),
    "functional linear": (
        lambda x, stack, chosen: sum((chosen == i)[:, None] * F.linear(x, stack[i]) for i in range(COUNT)),
        False,
    ),
}
"""{way to read experts: (function, whether the stack is [experts, inputs, outputs])}."""


def planned(model: nn.Module, x: Tensor, **settings: object) -> Audit:
    return audit(model, x, strategies="cast", quick=True, **{"max_error": 0.5, **settings})


def output(model: Experts, scheme: str, x: Tensor, inputs_first: bool) -> Tensor:
    """The output with everything quantized by hand, expert by expert."""
    row = SCHEMES[scheme]

    def made(weight: Tensor) -> Tensor:
        return fake_quantize(weight, row.weight).values

    def given(y: Tensor) -> Tensor:
        return y if row.activation is None else fake_quantize(y, row.activation).values

    chosen = F.linear(given(x), made(model.router.weight), model.router.bias).argmax(-1)
    order = chosen.argsort(stable=True)
    stack = model.up.mT if inputs_first else model.up
    weights = torch.stack([made(expert) for expert in stack])
    y = torch.einsum("ni,noi->no", given(x[order]), weights[chosen[order]])
    return F.linear(given(y), made(model.head.weight), model.head.bias)


@pytest.mark.parametrize("way", READS)
@torch.no_grad()
def test_a_plan_quantizes_each_expert_by_itself(way: str) -> None:
    read, inputs_first = READS[way]
    sizes = (WIDTH, WIDE) if inputs_first else (WIDE, WIDTH)
    model, x = seeded(lambda: Experts(read, sizes)), normal(24, WIDTH, seed=1)
    with torch.enable_grad():
        found = planned(model, x, formats="int8_weights,fp8")
    plans = {one.name: one for one in found.quantized_plans}
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    everything = sum(parameter.numel() for parameter in model.parameters())
    for scheme in ("int8_weights", "fp8"):
        one = plans[scheme]
        assert one.layers == dict.fromkeys(("router", "head", "up"), scheme)
        assert one.left_out == ()
        assert one.model_bits == pytest.approx(16 - 8 * weights / everything)
        expected = output(model, scheme, x, inputs_first) - model(x)
        assert one.calibration_error == pytest.approx(float(expected.norm() / model(x).norm()), rel=1e-4)


def test_blocks_and_tensor_scales_are_of_one_expert() -> None:
    model, x = seeded(lambda: Experts(grouped, (WIDTH, WIDE))), normal(24, WIDTH, seed=1)
    for scheme in ("fp8_tensor", "nvfp4"):
        (one,) = planned(model, x, formats=scheme, max_error=5.0).quantized_plans
        by = SCHEMES[scheme].weight
        together = fake_quantize(model.up.mT, by).values
        apart = torch.stack([fake_quantize(expert, by).values for expert in model.up.detach().mT])
        assert not torch.equal(together, apart)
        measured = next(layer for layer in planned(model, x, formats=scheme).quantization if layer.key == "up")
        with torch.no_grad():
            chosen = model.router(x).argmax(-1).sort(stable=True).values
            order = model.router(x).argmax(-1).argsort(stable=True)
            exact = grouped(x[order], model.up, chosen)
            error = (grouped(x[order], apart.mT, chosen) - exact).norm() / exact.norm()
        assert measured.weight_error == pytest.approx(float(error), rel=1e-3)
        assert one.layers["up"] == scheme


def test_code_names_experts_that_its_library_leaves_in_16_bits() -> None:
    model, x = seeded(lambda: Experts(grouped, (WIDTH, WIDE))), normal(24, WIDTH, seed=1)
    model = nn.Sequential(model)
    found = planned(model, x, formats="int8")
    code = snippet(found, "compressed-tensors", "int8")
    assert "0.up (parameter without a module, int8)" in " ".join(code.replace("\n# ", " ").split())
    names = {}
    exec(code, names)
    assert names["QUANTIZATION_CONFIG"]["ignore"] == ["0"]
    (one,) = found.quantized_plans
    assert one.as_pasted["compressed-tensors"].error < one.error  # of the router and the head alone
    shown = " ".join(text(found, width=200, color=False, most=100).split())
    assert "In 16 bits in the code for every library: 0.up." in shown


def test_experts_that_are_multiplied_otherwise_are_named_and_count_in_the_average() -> None:
    """A product with a weight that is computed from the stack has no layer."""
    model = seeded(lambda: Experts(lambda x, stack, chosen: x @ (stack[0] * stack[1]), (WIDTH, WIDE)))
    found = planned(model, normal(24, WIDTH, seed=1), formats="int8")
    (one,) = found.quantized_plans
    quantized = model.router.weight.numel() + model.head.weight.numel()
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert one.effective_bits == 8.0
    assert one.model_bits == pytest.approx(16 - 8 * quantized / everything)
    shown = " ".join(text(found, width=200, color=False, most=100).split())
    assert f"with {one.model_bits:.2f} bits per weight on average over the whole model" in shown


IMPLEMENTATIONS = itertools.product(("Mixtral", "GptOss"), ("grouped_mm", "batched_mm", "eager"))


@pytest.mark.parametrize(("name", "implementation"), thinned(IMPLEMENTATIONS, 2))
def test_experts_of_transformers_are_quantized(name: str, implementation: str) -> None:
    """Mixtral stores [experts, outputs, inputs], gpt-oss [experts, inputs, outputs]."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=40, num_hidden_layers=1, num_local_experts=4, head_dim=16, **sizes
    )
    model = seeded(lambda: getattr(transformers, f"{name}ForCausalLM")(config))
    model.set_experts_implementation(implementation)
    experts = {key: p for key, p in model.named_parameters() if "experts" in key and p.dim() == 3}
    for p in experts.values():
        nn.init.normal_(p, std=0.2)
    ids = {"input_ids": torch.arange(16).view(2, 8)}
    found = audit(model, ids, formats="int8_weights", max_error=0.5, strategies="cast", quick=True)
    (one,) = found.quantized_plans
    assert one.layers.keys() >= experts.keys()
    summed = -1 if name == "Mixtral" else -2
    with torch.no_grad():
        exact = model(**ids).logits
        for key, p in model.named_parameters():
            if one.layers.get(key.removesuffix(".weight")):
                dim = summed if key in experts else -1
                made = fake_quantize(p.movedim(dim, -1), SCHEMES["int8_weights"].weight).values.movedim(-1, dim)
                p.copy_(made)
        error = (model(**ids).logits - exact).norm() / exact.norm()
    assert one.calibration_error == pytest.approx(float(error), rel=1e-3)
