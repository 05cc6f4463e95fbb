"""Plans for vLLM, by the rules that its source reads a checkpoint by: one dtype, and one scheme for layers that it joins."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records.audit import Audit
from auditor.records.quantization import QuantizedPlan
from auditor.snippets import snippet
from tests.support.patching import scope
from tests.support.snippets import document, pasted
from tests.support.subjects import seeded


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of vllm.LLM, which is not installed here."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **given: calls.append(given)))
    return calls


def words(text: str) -> str:
    return " ".join(text.replace("\n# ", " ").split())


def test_a_plan_without_fp32_is_a_dtype(vllm: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    code = snippet(document({"cast_bf16": {"": scope("bf16")}}, "cast_bf16"), "vllm")
    pasted(code, monkeypatch)["serve"]("folder", max_model_len=64)
    assert vllm == [{"model": "folder", "dtype": "bfloat16", "max_model_len": 64}]
    assert "vllm serve CHECKPOINT --dtype bfloat16" in code
    assert "vLLM refuses FP16 for Gemma 2" in words(
        snippet(document({"cast_fp16": {"": scope("fp16")}}, "cast_fp16"), "vllm")
    )


def test_a_plan_with_fp32_parts_names_them_and_the_dtype_that_holds() -> None:
    content = document({"cast_fp16": {"": scope("fp16"), "norm": scope("fp32")}}, "cast_fp16")
    content["baselines"] = {}
    said = words(snippet(content, "vllm"))
    assert (
        "keeps this in FP32: norm. The whole model in low precision does not hold: vllm serve CHECKPOINT --dtype float32"
        in said
    )
    content["baselines"] = {"cast_bf16": {"measured_error": 0.003, "holds": True}}
    said = words(snippet(content, "vllm"))
    assert "The whole model in BF16 also holds, with an error of 0.003: vllm serve CHECKPOINT --dtype bfloat16" in said


class Block(nn.Module):
    """A layer of attention and a gated product, named as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj"):
            self.add_module(name, nn.Linear(32, 32, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.q_proj(x) @ self.k_proj(x).transpose(-1, -2)).softmax(-1) @ self.v_proj(x)
        return self.o_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))


@pytest.fixture(scope="module")
def audit() -> Audit:
    model = nn.Sequential(seeded(Block), seeded(Block)).eval()
    return auditor.audit(model, torch.randn(2, 4, 32), formats="int8", max_error=0.5, quick=True)


def planned(audit: Audit, layers: dict[str, str | None]) -> Audit:
    (plan,) = [plan for plan in audit.quantized_plans if plan.name == "int8"]
    every = {**dict.fromkeys(plan.layers), **layers}
    return replace(audit, quantized_plans=(replace(plan, layers=every),))


def read_by_vllm(config: dict[str, Any], layer: str, names: tuple[str, ...]) -> str | None:
    """The group of a joined layer, as `get_scheme` of vLLM finds it; None if ignored. Raises: ValueError as vLLM does."""
    paths = [f"{layer}.{name}" for name in names]
    ignored = [path in config["ignore"] for path in paths]
    if any(ignored) and not all(ignored):
        raise ValueError("Found different quantization schemes for the shards")
    if all(ignored):
        return None
    found = [
        next((name for name, group in config["config_groups"].items() if path in group["targets"]), None)
        for path in paths
    ]
    if len(set(found)) != 1:
        raise ValueError("Unable to find matching target")
    return found[0]


ATTENTION, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def test_joined_layers_have_one_scheme_or_none(
    audit: Audit, vllm: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = dict.fromkeys(("0.q_proj", "0.k_proj", "0.v_proj", "0.up_proj", "0.o_proj", "1.q_proj"), "int8")
    layers |= {"1.gate_proj": "int8", "1.up_proj": "int8_weights"}
    code = snippet(planned(audit, layers), "vllm")
    names = pasted(code, monkeypatch)
    config = names["QUANTIZATION_CONFIG"]
    found = {(layer, joined): read_by_vllm(config, layer, joined) for layer in "01" for joined in (ATTENTION, GATED)}
    assert {key for key, group in found.items() if group} == {("0", ATTENTION)}
    assert read_by_vllm(config, "0", ("o_proj",)) is not None
    assert "0.up_proj (one layer of gate_proj and up_proj, which the plan treats differently)" in words(code)
    names["serve"]("folder")
    assert vllm == [{"model": "folder"}]
    plain = pasted(snippet(planned(audit, layers), "compressed-tensors"), monkeypatch)["QUANTIZATION_CONFIG"]
    with pytest.raises(ValueError, match="shards"):
        read_by_vllm(plain, "1", ATTENTION)


def test_a_scheme_without_a_kernel_is_left_out(audit: Audit) -> None:
    said = words(snippet(planned(audit, {"0.o_proj": "int8_tensor", "1.o_proj": "int8"}), "vllm"))
    assert "stay in 16 bits: 0.o_proj (linear, int8_tensor)." in said
    assert "1 of 12 layers quantized" in said or "1 of 2 layers quantized" in said


def test_a_named_plan_of_a_format_is_still_a_dtype(audit: Audit) -> None:
    assert isinstance(audit.quantized_plans[0], QuantizedPlan)
    assert "QUANTIZATION_CONFIG" in snippet(audit, "vllm")
