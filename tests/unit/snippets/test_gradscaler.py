"""The training step of the GradScaler snippet, run with torch's own scaler on the CPU."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from auditor.artefact.applying import apply_plan
from auditor.records.training import LossScale, Training
from auditor.snippets import snippet
from tests.architectures.zoo import specimen
from tests.support.patching import Net, plan, scope
from tests.support.snippets import document, pasted
from tests.support.subjects import DTYPES, normal, seeded


def scopes(fmt: str) -> dict[str, dict[str, str]]:
    return {"": scope(fmt), "norm": scope("fp32")}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(batch).float(), torch.ones(len(batch), 3))


def prepared(fmt: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, nn.Module, torch.amp.GradScaler]:
    name = f"autocast_{fmt}"
    text = snippet(document({name: scopes(fmt)}, name), "gradscaler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = pasted(text, monkeypatch, seeded(Net), {name: scopes(fmt)})
    model, scaler = found["prepare"](seeded(Net))
    return found, model, scaler


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_a_step_lowers_the_loss_and_moves_fp32_weights(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, model, scaler = prepared(fmt, monkeypatch)
    assert scaler.is_enabled() == (fmt == "fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = [float(found["train_step"](model, scaler, optimizer, loss, normal(8, 4), max_norm=1.0)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_scale_that_an_audit_of_training_recommends_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    content = document({"autocast_fp16": scopes("fp16")}, "autocast_fp16")
    assert "an audit with --mode training determines the scale" in snippet(content, "gradscaler").replace("\n# ", " ")
    window = LossScale(1.0, 1024.0, 512.0, 0.0, 0.0, None, "", None, {}, {})
    of = {"format": "fp16", "recommendation": "", "plan": None, "loss": 0.0, "loss_source": "", "bf16": None}
    training = Training(fp16=window, errors={}, advice=(), **of)
    text = snippet(content | {"training": json.loads(json.dumps(asdict(training)))}, "gradscaler")
    assert "was determined from this model's gradients" in text.replace("\n# ", " ")
    found = pasted(text, monkeypatch, seeded(Net), {"autocast_fp16": scopes("fp16")})
    _, scaler = found["prepare"](seeded(Net))
    assert scaler.get_scale() == 512


@pytest.mark.parametrize(("tool", "text"), [("gradscaler", "DEVICE = 'cpu'"), ("lightning", 'device="cpu"')])
def test_a_plan_for_a_cpu_trains_on_the_cpu(tool: str, text: str) -> None:
    """Its autocast regions are the CPU's: on a GPU they would change nothing."""
    content = document({"autocast_bf16": scopes("bf16")}, "autocast_bf16")
    assert text not in snippet(content, tool)
    of_cpu = {"capability": "AVX512", "isa": "", "row": "Intel", "threads": 1, "runs": {}, "for_both": []}
    assert text in snippet(content | {"cpu": of_cpu}, tool)
    assert "cuda" not in snippet(content | {"cpu": of_cpu}, tool)


# The snippet for transformers, run: what from_pretrained stores in FP32, and that the loaded model follows the plan.

transformers = pytest.importorskip("transformers")


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    return seeded(lambda: transformers.BertForMaskedLM(config))


LAYER, TOKENS = "bert.encoder.layer", {"input_ids": torch.arange(12).reshape(2, 6)}
CASES = {
    "islands in a low model": (
        bert,
        {"": "low", f"{LAYER}.1.output": "fp32", "bert.embeddings.LayerNorm": "fp32", f"{LAYER}.1.output.dense": "low"},
        TOKENS,
    ),
    "low layers in an FP32 model": (
        bert,
        {"": "fp32", f"{LAYER}.0": "low", f"{LAYER}.0.attention.output": "fp32"},
        TOKENS,
    ),
    "a head that shares the table of the embedding": (bert, {"": "low", "cls.predictions.decoder": "fp32"}, TOKENS),
    "layers the class keeps in FP32 by itself, lowered": (
        lambda: specimen("t5").model,
        {"": "low", "encoder.final_layer_norm": "fp32", "decoder.block.1.layer.2.DenseReluDense.wo": "fp32"},
        {"input_ids": torch.arange(1, 7)[None], "decoder_input_ids": torch.tensor([[0, 3]])},
    ),
}


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_loaded_model_is_patched(case: str, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, precisions, inputs = CASES[case]
    model = make()
    model.save_pretrained(tmp_path)
    scopes = {path: scope("fp32" if kept == "fp32" else fmt) for path, kept in precisions.items()}
    name = f"cast_{fmt}"
    code = snippet(document({name: scopes}, name, model), "hf")
    kept_before = type(model)._keep_in_fp32_modules_strict
    found = pasted(code, monkeypatch, model, {name: scopes})["load"](type(model), tmp_path)
    assert type(model)._keep_in_fp32_modules_strict is kept_before
    expected = apply_plan(make(), plan("cast", scopes, fmt))
    dtypes = {key: parameter.dtype for key, parameter in expected.named_parameters()}
    assert {key: parameter.dtype for key, parameter in found.named_parameters()} == dtypes
    assert set(dtypes.values()) == {torch.float32, DTYPES[fmt]}
    with torch.no_grad():
        assert torch.equal(found.eval()(**inputs).logits, expected(**inputs).logits)


def test_a_tied_weight_that_the_plan_omits_is_refused_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a document without tied_parameters the patterns miss one, and the model says so."""
    model = bert()
    model.save_pretrained(tmp_path)
    scopes = {"": scope("fp16"), "cls.predictions.decoder": scope("fp32")}
    load = pasted(
        snippet(document({"cast_fp16": scopes}, "cast_fp16"), "hf"), monkeypatch, model, {"cast_fp16": scopes}
    )
    with pytest.raises(ValueError, match="load the FP32 checkpoint"):
        load["load"](type(model), tmp_path)


# The snippet for Lightning, run by a real Trainer: it trains under an autocast plan and predicts under a cast one.


SCOPES = {"": scope("bf16"), "norm": scope("fp32"), "head.2": scope("fp32")}


@pytest.fixture
def lightning() -> Iterator[Any]:
    """Imported by the process that runs these tests, and no other: it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("lightning")


def task(lightning: Any) -> Any:
    """A LightningModule around the audited model; notes dtypes and gradients as they pass."""

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(Net)
            self.seen: dict[str, Any] = {}

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            self.net.norm.register_forward_hook(lambda m, args, out: self.seen.update(norm=out.dtype))
            self.net.first.register_forward_hook(lambda m, args, out: self.seen.update(first=out.dtype))
            return nn.functional.mse_loss(self.net(batch), torch.ones(len(batch), 3))

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen.update(grads={p.grad.dtype for p in self.parameters() if p.grad is not None})

        def predict_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Task()


def trainer(lightning: Any, plugin: Any) -> Any:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lightning.Trainer(plugins=[plugin], accelerator="cpu", max_steps=1, **dict.fromkeys(off, False))


def plugin_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    scopes = SCOPES
    if name.endswith("fp16"):
        scopes = {path: {**one, "precision": one["precision"].replace("bf", "fp")} for path, one in SCOPES.items()}
    text = snippet(document({name: scopes}, name), "lightning")
    return pasted(text, monkeypatch, seeded(Net), {name: scopes})["PlanPrecision"]


@pytest.mark.parametrize(("name", "low"), [("autocast_bf16", torch.bfloat16), ("autocast_fp16", torch.float16)])
def test_it_trains_under_autocast(name: str, low: torch.dtype, lightning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = task(lightning)
    plugin = plugin_of(name, monkeypatch)("net", device="cpu")
    assert (plugin.scaler is not None) == (low is torch.float16)
    trainer(lightning, plugin).fit(module, DataLoader(normal(4, 4), batch_size=4))
    assert module.seen == {"first": low, "norm": torch.float32, "grads": {torch.float32}}
    before = seeded(Net)
    assert not torch.equal(module.net.first.weight, before.first.weight)
    assert type(module.net) is Net


def test_it_predicts_under_a_cast_plan(lightning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, plugin = task(lightning), normal(4, 4), plugin_of("cast_bf16", monkeypatch)("net")
    (answer,) = trainer(lightning, plugin).predict(module, DataLoader(x, batch_size=4))
    with torch.no_grad():
        assert torch.equal(answer, apply_plan(seeded(Net), plan("cast", SCOPES))(x))
    assert module.net.first.weight.dtype is torch.bfloat16
