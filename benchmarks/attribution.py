"""First-order attribution against brute force: each node alone low, all else FP32, the model run to its end.

`PYTHONPATH=tests/stubs python -m benchmarks.attribution` prints both tables of results/measurement.md. The models are kinds,
as their libraries write them: small enough to run once per node many times over, or of full size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, fx

import auditor
from auditor.isolation.outputs import tensor_outputs
from auditor.measure.measure import Measurement
from auditor.numerics.metrics import output_error
from auditor.records import Contribution
from tests.architectures import zoo
from tests.architectures.zoo import Made, library
from tests.support import brute_force
from tests.support.brute_force import spearman
from tests.support.subjects import FORMATS, effects_of, measurement_of

FLOOR = 1e-7
"""Errors below this, or below ten times what FP32 itself leaves open between two kernels, are not compared."""

BATCH = 8
VOCABULARY = 200
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _resnet() -> Made:
    model = library("timm").create_model("resnet10t", pretrained=False, num_classes=20, zero_init_last=False)
    return model, (torch.randn(BATCH, 3, 64, 64),), {}


def _vit() -> Made:
    transformer = library("timm.models.vision_transformer").VisionTransformer
    model = transformer(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=20)
    return model, (torch.randn(BATCH, 3, 32, 32),), {}


def _gpt2() -> Made:
    text = library("transformers")
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 4}
    config = text.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False)
    return text.GPT2LMHeadModel(config), (_tokens(16),), {}


def _t5() -> Made:
    text = library("transformers")
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    model = text.T5ForConditionalGeneration(text.T5Config(**sizes, use_cache=False))
    return model, (), {"input_ids": _tokens(16), "decoder_input_ids": _tokens(12)}


def _whisper() -> Made:
    text = library("transformers")
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "max_source_positions": 32}
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "max_target_positions": 16}
    sizes = {"vocab_size": VOCABULARY, "num_mel_bins": 16, "d_model": 64, "use_cache": False}
    model = text.WhisperForConditionalGeneration(text.WhisperConfig(**sizes, **SPECIAL, **encoder, **decoder))
    return model, (), {"input_features": torch.randn(BATCH, 16, 64), "decoder_input_ids": _tokens(12)}


def _resnet50() -> Made:
    model = library("timm").create_model("resnet50", pretrained=False, zero_init_last=False)
    return model, (torch.randn(BATCH // 2, 3, 224, 224),), {}


def _convnext() -> Made:
    model = library("timm").create_model("convnext_tiny", pretrained=False, ls_init_value=1.0)
    return model, (torch.randn(BATCH // 2, 3, 224, 224),), {}


def _tokens(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


MODELS: dict[str, Callable[[], Made]] = {"resnet": _resnet, "vit": _vit, "gpt2": _gpt2, "t5": _t5, "whisper": _whisper}
LARGE: dict[str, Callable[[], Made]] = {"resnet50": _resnet50, "convnext_tiny": _convnext}
"""Of full size, and so attributed with a pass or two; every branch adds to the outputs, as in a trained model."""

specimen = partial(zoo.specimen, among=MODELS | LARGE)


@dataclass(frozen=True)
class Attributed:
    """A model's measurement and the contributions of its nodes."""

    measured: Measurement
    contributions: dict[str, dict[str, Contribution]]

    def error(self, interpreter: fx.Interpreter) -> float:
        """Error of the outputs when `interpreter` runs the graph."""
        flat = [x.detach() if isinstance(x, Tensor) else x for x in self.measured.flat_inputs]
        with torch.no_grad():
            outputs = interpreter.run(*flat)
        return output_error([x.detach() for x in self.measured.outputs], tensor_outputs(outputs))

    def floor(self) -> float:
        """Below this, nothing is said: autograd's kernels and those without it differ by as much."""
        return max(FLOOR, 10 * self.error(fx.Interpreter(self.measured.capture.graph_module)))


@cache
def attributed(name: str) -> Attributed:
    chosen = specimen(name)
    measured = measurement_of(chosen.model, *chosen.args, **chosen.kwargs)
    return Attributed(measured, effects_of(measured))


@dataclass(frozen=True)
class Compared:
    """Predicted and true effects of a model's nodes in a format; `left_out`: predictions for the nodes too small to compare."""

    predicted: Mapping[str, float]
    true: Mapping[str, float]
    left_out: Mapping[str, float]
    floor: float

    @property
    def ratios(self) -> tuple[float, float, float]:
        """5th percentile, median and 95th of predicted / true."""
        ratios = [self.predicted[node] / self.true[node] for node in self.true]
        twentieths = statistics.quantiles(ratios, n=20)
        return twentieths[0], statistics.median(ratios), twentieths[-1]

    @property
    def rho(self) -> float:
        """Rank correlation."""
        return spearman(list(self.predicted.values()), list(self.true.values()))


def compare(name: str, fmt: str, every: int = 1) -> Compared:
    """Every node of a model, or every n-th, run alone in the format."""
    found = attributed(name)
    graph_module, floor = found.measured.capture.graph_module, found.floor()
    nodes = [node.name for node in found.measured.capture.nodes.values() if node.floating][::every]
    predicted = {node: found.contributions[node][fmt].isolated for node in nodes}
    true = {node: found.error(brute_force.OneLow(graph_module, node, fmt)) for node in nodes}
    kept = {node: error for node, error in true.items() if error > floor}
    left_out = {node: predicted[node] for node in nodes if node not in kept}
    return Compared({node: predicted[node] for node in kept}, kept, left_out, floor)


def whole_plans(name: str) -> Iterator[tuple[str, float]]:
    """Every plan with anything low, and its predicted by its measured error."""
    chosen = specimen(name)
    audit = auditor.audit(chosen.model, chosen.args, kwargs=chosen.kwargs, device="cpu")
    for plan in audit.plans.values():
        if any(scope.precision != "fp32" for scope in plan.scopes.values()):
            assert plan.measured_error is not None, plan.verification
            yield plan.name, plan.predicted_error / plan.measured_error


def main() -> None:
    """Print the rows of both tables."""
    for name in MODELS | LARGE:
        for fmt in FORMATS:
            found = compare(name, fmt)
            low, median, high = found.ratios
            of = len(found.true) + len(found.left_out)
            told = f"{len(found.true)} of {of} | {found.rho:.3f} | {median:.2f} | {low:.2f} to {high:.2f}"
            print(f"| {name} | {fmt} | {told} |", flush=True)
    for name in MODELS | LARGE:
        print(f"| {name} |", " | ".join(f"{plan} {ratio:.2f}" for plan, ratio in whole_plans(name)), "|", flush=True)


if __name__ == "__main__":
    main()
