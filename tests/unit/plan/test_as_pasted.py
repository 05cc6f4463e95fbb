"""Code for libraries as it is pasted: the stated error and bytes are those that plain torch measures.

Libraries that are not installed are skipped.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor import audit
from auditor.artefact.libraries import LIBRARIES, stored_bits
from auditor.artefact.vllm import VLLM
from auditor.numerics.quantize import fake_quantize
from auditor.numerics.schemes import SCHEMES
from auditor.records.audit import Audit
from auditor.snippets import snippet
from tests.support.snippets import pasted
from tests.support.subjects import normal, seeded


class Net(nn.Module):
    """Convolutions, one of them grouped, which only some libraries quantize, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 128, 3, stride=2, groups=4)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.stem(x).relu()).relu().mean((2, 3))
        return self.down(nn.functional.gelu(self.up(x)))


X = normal(8, 3, 12, 12, seed=1)


def audited(scheme: str, **settings: object) -> Audit:
    asked = {"max_error": 0.3, "strategies": "cast", "quick": True, **settings}
    return audit(seeded(Net), X, formats=scheme, **asked)


def code(found: Audit, library: str) -> dict[str, Any]:
    return pasted(snippet(found, library), pytest.MonkeyPatch())


def error(model: nn.Module) -> float:
    with torch.no_grad():
        exact, given = seeded(Net)(X), model(X).float()
    return float((given - exact).norm() / exact.norm())


def bytes_of(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.itemsize


def stored(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(bytes_of(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


@pytest.mark.parametrize("scheme", ["int8", "int8_weights", "int4"])
def test_torchaos_code_is_stated_with_its_layers_in_bf16(scheme: str) -> None:
    """The plan quantizes convolutions too, which torchao leaves in BF16."""
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    found = audited(scheme)
    (one,) = found.quantized_plans
    model = code(found, "torchao")["quantize"](seeded(Net))
    assert one.pasted_error == pytest.approx(error(model), rel=5e-3)
    assert one.as_pasted["torchao"].weights_bytes == pytest.approx(stored(model), rel=5e-3)
    alone = code(found, "torchao")["quantize"](seeded(Net), dtype=None)
    assert one.as_pasted["torchao"].error == pytest.approx(error(alone), rel=5e-3)
    said = " ".join(snippet(found, "torchao").replace("\n# ", " ").split())
    assert f"with all other layers in BF16: error {one.pasted_error:.2g}." in said


@pytest.mark.parametrize("scheme", ["int8", "int8_weights", "int4", "fp8", "int8_tensor"])
def test_modelopts_code_is_stated_with_its_rounding(scheme: str) -> None:
    pytest.importorskip("modelopt.torch.quantization")
    found = audited(scheme)
    model = code(found, "modelopt")["quantize"](seeded(Net), lambda model: model(X))
    stated = found.quantized_plans[0].as_pasted["ModelOpt"]
    assert stated.error == pytest.approx(error(model), rel=5e-3)
    assert stated.weights_bytes == pytest.approx(stored(model), rel=1e-2)


def test_integers_of_modelopt_are_divided_by_127() -> None:
    rounding = LIBRARIES["modelopt"].rounding
    assert rounding is not None
    by = rounding(SCHEMES["int8"].weight, True)
    made = fake_quantize(torch.tensor([[127.0, -127.0, 0.4, 63.6], [0.0, 0.0, 0.0, 0.0]]), by).values
    assert made.tolist() == [[127.0, -127.0, 0.0, 64.0], [0.0, 0.0, 0.0, 0.0]]
    assert rounding(SCHEMES["fp8"].weight, True) == SCHEMES["fp8"].weight


def test_code_that_exceeds_the_limit_by_its_own_rounding_says_so_first() -> None:
    """The plan is within the limit, and ModelOpt's rounding is not."""
    found = audited("int4", max_error=0.3)
    (one,) = found.quantized_plans
    ours, theirs = one.error, one.as_pasted["ModelOpt"].error
    assert ours != theirs
    tight = replace(found, max_error=0.99 * theirs)
    assert snippet(tight, "modelopt").startswith("# This code EXCEEDS the limit: error")
    assert not snippet(found, "modelopt").startswith("# This code EXCEEDS")


@pytest.mark.parametrize(
    ("library", "scheme", "sizes", "bits"),
    [
        ("torchao", "int8", (4, 128), 4 * 128 * 8 + 4 * 40),  # an FP32 scale and an INT8 zero point for each row
        (
            "torchao",
            "int4",
            (4, 256),
            4 * 256 * 8 + 8 * 24,
        ),  # one byte each; a BF16 scale and a zero point for each group
        ("torchao", "nvfp4", (4, 64), 4 * 64 * 4 + 16 * 8),
        ("compressed-tensors", "int4", (4, 256), 4 * 256 * 4 + 8 * 16),
        ("compressed-tensors", "fp8_tensor", (4, 256), 4 * 256 * 8 + 16),
        ("modelopt", "int8", (4, 128), 4 * 128 * 16 + 4 * 32),  # simulated: weights in BF16, largest magnitudes in FP32
    ],
)
def test_stored_bits_include_scales(library: str, scheme: str, sizes: tuple[int, int], bits: int) -> None:
    assert stored_bits(LIBRARIES[library], scheme, sizes, 16) == bits


def test_code_for_a_checkpoint_that_does_not_load_says_so_first() -> None:
    found = audited("int4_asymmetric")
    for library in ("compressed-tensors", "vllm"):
        assert snippet(found, library).startswith("# This code CANNOT be used with int4_asymmetric")
    assert "CANNOT" not in snippet(found, "torchao")
    assert "CANNOT" not in snippet(audited("int4"), "compressed-tensors")


@pytest.mark.parametrize("scheme", ["int8", "int8_weights"])
def test_transformers_loads_what_the_code_states(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    config = transformers.LlamaConfig(vocab_size=48, num_key_value_heads=2, **sizes)
    model = seeded(lambda: transformers.LlamaForCausalLM(config))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    ids = torch.arange(24).view(2, 12)
    found = audit(model, {"input_ids": ids}, formats=scheme, max_error=0.3, strategies="cast", quick=True)
    model.save_pretrained(tmp_path)
    loaded = code(found, "hf-quantization")["load"](type(model), tmp_path)
    stated = found.quantized_plans[0].as_pasted["transformers"]
    with torch.no_grad():
        exact, given = model(ids).logits, loaded(ids).logits
    assert stated.error == pytest.approx(float((given - exact).norm() / exact.norm()), rel=5e-3)
    assert stated.weights_bytes == pytest.approx(stored(loaded), rel=5e-3)
    tied = code(found, "torchao")["quantize"](copy.deepcopy(model))
    in_torchao = found.quantized_plans[0].as_pasted["torchao"]
    assert in_torchao.weights_bytes == pytest.approx(stored(tied), rel=5e-3)  # a tied weight is stored twice


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int8_weights", "int4"])
def test_llm_compressor_writes_what_the_code_states(scheme: str, tmp_path: Path) -> None:
    llmcompressor = pytest.importorskip("llmcompressor")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=48, num_key_value_heads=2, **sizes)
    model = seeded(lambda: transformers.LlamaForCausalLM(config))
    ids = torch.arange(24).view(2, 12)
    found = audit(model, {"input_ids": ids}, formats=scheme, max_error=0.5, strategies="cast", quick=True)
    model.save_pretrained(tmp_path / "whole")
    other = type(model).from_pretrained(tmp_path / "whole")
    llmcompressor.oneshot(model=other, recipe=code(found, "compressed-tensors")["modifier"](), processor=object())
    other.save_pretrained(tmp_path / "small", save_compressed=True)
    loaded = type(model).from_pretrained(tmp_path / "small")
    stated = found.quantized_plans[0].as_pasted["compressed-tensors"]
    with torch.no_grad():
        exact, given = model(ids).logits, loaded(ids).logits
    assert stated.error == pytest.approx(float((given - exact).norm() / exact.norm()), rel=2e-3)
    written = sum(file.stat().st_size for file in (tmp_path / "small").glob("*.safetensors"))
    assert stated.weights_bytes == pytest.approx(written, rel=0.05)  # a header of names


@torch.no_grad()
def test_small_inputs_meet_the_lower_bound_of_scales_in_vllm() -> None:
    """vLLM divides a token by at least 1 / (448 * 512), so that small tokens lose digits; a zero token stays zero."""
    x = normal(16, 64, seed=1) * 1e-6
    x[3] = 0.0
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 32, bias=False)))
    with torch.enable_grad():
        found = audit(model, x, formats="fp8", max_error=0.5, strategies="cast", quick=True)
    (one,) = found.quantized_plans
    weight = fake_quantize(model[0].weight, SCHEMES["fp8"].weight).values
    scale = (x.abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    given = (x / scale).to(torch.float8_e4m3fn).float() * scale
    exact = model(x)
    expected = float((given @ weight.T - exact).norm() / exact.norm())
    assert one.as_pasted["vLLM"].error == pytest.approx(expected, rel=1e-3)
    assert expected > 1.05 * one.error
    said = " ".join(snippet(found, "vllm").replace("\n# ", " ").split())
    assert f"emulation of vLLM's rounding with all other layers in FP32: error {expected:.2g}" in said
    assert "This code needs a GPU, and was not run." in said


def test_integers_of_inputs_are_divided_by_127_in_vllm() -> None:
    assert VLLM.rounding is not None
    activation = SCHEMES["int8"].activation
    assert activation is not None
    assert VLLM.rounding(activation, False).rule == "narrow"
    assert VLLM.rounding(SCHEMES["int8"].weight, True).rule == "symmetric_by_division"
