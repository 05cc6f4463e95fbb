"""Counts and costs of `auditor compare`, and runs of ten models in two environments.

python -m benchmarks.compare planted    60 planted bugs and 60 clean pairs: the table of docs/compare.md
python -m benchmarks.compare cost       forwards that a recording costs
python -m benchmarks.compare record DIRECTORY [MODEL ...]    records ten models in this environment
python -m benchmarks.compare versions DIRECTORY DIRECTORY    compares the recordings of two environments
"""

from __future__ import annotations

import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from auditor.features.compare.compare import compare
from auditor.features.compare.record import record_run
from auditor.features.compare.recording import read, to_json
from auditor.isolation.process import disable_fused_path
from auditor.loading.subject import from_object
from auditor.report.words import ratio
from tests.features.compare.planted import BUGS, CLEAN, NAMES, compared, is_right

Built = tuple[nn.Module, dict[str, torch.Tensor]]


def planted() -> None:
    """Print a row for each model: bugs that were found, at the right place, and clean pairs that differ."""
    counts = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as scratch:
        for change in BUGS:
            found = compared(change, Path(scratch))
            counts[change.model, "bugs"] += 1
            counts[change.model, "found"] += found.verdict == "differ"
            counts[change.model, "right"] += found.verdict == "differ" and is_right(change, found)
        for change in CLEAN:
            counts[change.model, "clean"] += 1
            counts[change.model, "alarms"] += compared(change, Path(scratch)).verdict not in ("equal", "stored")
    kinds = ("bugs", "found", "right", "clean", "alarms")
    print("| model | bugs | found | at the right line | clean pairs | false alarms |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in NAMES:
        print("|".join(["", f" {name} ", *(f" {counts[name, kind]} " for kind in kinds), ""]))
    totals = [sum(counts[name, kind] for name in NAMES) for kind in kinds]
    print("|".join(["", " all ", *(f" {total} " for total in totals), ""]))


class Residual(nn.Module):
    """Two convolutions with batch norms, and a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(y)))


def residual_network() -> Built:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 4, 3)]
    for width in (64, 128, 256, 512):
        layers += [Residual(width), Residual(width)]
        if width < 512:
            layers.append(nn.Conv2d(width, 2 * width, 1, 2))
    return nn.Sequential(*layers), {"input": torch.randn(4, 3, 224, 224)}


def encoder() -> Built:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), {"src": torch.randn(2, 256, 512)}


def decoder() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 4000, (2, 128))}


def cost() -> None:
    """Print how many forwards a recording costs, in processor time."""
    print("| model | forward | recording | with gradients | bytes for each value |")
    print("|---|---:|---:|---:|---:|")
    for make in (residual_network, encoder, decoder):
        torch.manual_seed(0)
        model, inputs = make()
        subject = from_object(model.eval(), None, inputs)

        def forward(model: nn.Module = model, inputs: dict[str, torch.Tensor] = inputs) -> None:
            with torch.no_grad(), disable_fused_path():
                model(**inputs)

        record_run(subject)
        one = min(_seconds(forward) for _ in range(5))
        whole = min(_seconds(lambda subject=subject: record_run(subject)) for _ in range(3))
        more = _seconds(lambda subject=subject: record_run(subject, gradients=True))
        recording = record_run(subject)
        size = len(to_json(recording)) / len(recording.values)
        print(f"| {make.__name__} | {one:.2f} s | {whole / one:.1f} | {more / one:.1f} | {size:.0f} |")


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _tokens(count: int = 12) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 90, (2, count))}


SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _transformers(name: str, kind: str, given: dict[str, torch.Tensor], **config: Any) -> Built:
    import transformers

    made = getattr(transformers, f"{name}Config")(**config)
    made.use_cache = False
    return getattr(transformers, f"{name}{kind}")(made), given


def _timm(name: str) -> Built:
    import timm

    return timm.create_model(name, num_classes=10), {"x": torch.randn(1, 3, 64, 64)}


class Tagger(nn.Module):
    """A bidirectional LSTM with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 16, bidirectional=True, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


MODELS: dict[str, Callable[[], Built]] = {
    "llama": lambda: _transformers("Llama", "ForCausalLM", _tokens(), **SMALL, num_key_value_heads=2),
    "gpt2": lambda: _transformers(
        "GPT2", "LMHeadModel", _tokens(), vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
    "bert": lambda: _transformers("Bert", "ForMaskedLM", _tokens(), **SMALL),
    "t5": lambda: _transformers(
        "T5",
        "ForConditionalGeneration",
        _tokens() | {"decoder_input_ids": torch.randint(3, 90, (2, 5))},
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
    ),
    "gemma2": lambda: _transformers("Gemma2", "ForCausalLM", _tokens(), **SMALL, num_key_value_heads=2, head_dim=8),
    "vit": lambda: _transformers(
        "ViT",
        "ForImageClassification",
        {"pixel_values": torch.randn(1, 3, 32, 32)},
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    ),
    "resnet18 (timm)": lambda: _timm("resnet18"),
    "convnext_atto (timm)": lambda: _timm("convnext_atto"),
    "mobilenetv3 (timm)": lambda: _timm("mobilenetv3_small_050"),
    "lstm": lambda: (Tagger(), {"x": torch.randn(2, 20, 16)}),
}
"""{name: builds a small model with its inputs}."""


RENAMED = {
    "attention.output.dense": "attention.o_proj",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "vit.encoder.layer": "vit.layers",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
"""{part of a parameter's name: the part in newer versions}."""


def _fill(model: nn.Module) -> None:
    """The same parameters in every version, which may initialize them differently: drawn with the name as seed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for old, new in RENAMED.items():
                name = name.replace(old, new) if name.startswith("vit.") else name
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            is_gain = parameter.dim() < 2 and name.endswith("weight")
            # Whole numbers: normal ones differ in the last bit between processors.
            whole = torch.randint(-1000, 1000, parameter.shape, generator=generator)
            parameter.copy_(whole / 8192 + float(is_gain))


def record_all(directory: Path, names: list[str]) -> None:
    """Record the models in this environment."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        torch.manual_seed(1)
        model, inputs = MODELS[name]()
        _fill(model)
        generator = torch.Generator().manual_seed(2)
        for key, x in inputs.items():
            whole = torch.randint(3, 90, x.shape, generator=generator)
            inputs[key] = whole / 32 if x.is_floating_point() else whole
        recording = record_run(from_object(model.eval(), None, inputs))
        (directory / f"{name}.json").write_text(to_json(recording), encoding="utf-8")


def versions(first: Path, second: Path) -> None:
    """Print a row for each model that was recorded in both environments."""
    print("| model | verdict | values matched | A - B in FP64 | A - B in the runs | rounding of A | rounding of B |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in MODELS:
        files = [directory / f"{name}.json" for directory in (first, second)]
        if not all(file.exists() for file in files):
            continue
        a, b = map(read, files)
        found = compare(a, b)
        pair = found.outputs[0]
        numbers = [ratio(x) for x in (pair.difference, pair.of_runs, pair.error_a, pair.error_b)]
        matched = f"{found.matched} of {len(a.values)}"
        print(f"| {name} | {found.verdict} | {matched} | {' | '.join(numbers)} |")


def main() -> None:
    match sys.argv[1:]:
        case ["planted"]:
            planted()
        case ["cost"]:
            cost()
        case ["record", directory, *names]:
            record_all(Path(directory), names)
        case ["versions", first, second]:
            versions(Path(first), Path(second))
        case _:
            print(__doc__)


if __name__ == "__main__":
    main()
