"""What an audit of a model larger than memory takes: Llama-style models of random weights, in shards, under `--memory`."""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.harness import Row, report

SIZES: dict[str, dict[str, int]] = {
    "0.2B": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16},
    "0.4B": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 28, "num_attention_heads": 16},
    "0.8B": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 25, "num_attention_heads": 16},
    "1.5B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 27, "num_attention_heads": 16},
}
VOCABULARY, TOKENS, SHARD = 32_000, 16, 1 << 30
COLUMNS = {
    "model": "",
    "parameters": ".3g",
    "weights GB": ".2f",
    "peak GB": ".2f",
    "other GB": ".2f",
    "CPU s": ".0f",
    "s": ".0f",
    "read GB": ".1f",
    "written GB": ".1f",
}


def shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama checkpoint, in the order in which the model reads them."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, width)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        found |= {f"{at}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = (width, inner)
        found |= {f"{at}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (width,), "lm_head.weight": (VOCABULARY, width)}


def make(folder: Path, config: dict[str, int]) -> int:
    """A directory as `save_pretrained` leaves it, with random weights in shards of a gigabyte; numbers in it."""
    settings = {
        **config,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": config["num_attention_heads"],
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes(config).items():
        if sum(4 * torch.Size(s).numel() for s in shards[-1].values()) > SHARD:
            shards.append({})
        shards[-1][name] = shape
    where, drawn = {}, torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    for index, tensors in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        where |= dict.fromkeys(tensors, file)
        _write(folder / file, tensors, drawn)
    index_file = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file), encoding="utf-8")
    return sum(torch.Size(shape).numel() for shape in shapes(config).values())


def _write(file: Path, tensors: dict[str, tuple[int, ...]], drawn: torch.Tensor) -> None:
    """One shard. Random numbers are drawn once and turned about for every tensor: they are made in seconds."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for place, shape in enumerate(tensors.values()):
            count = torch.Size(shape).numel()
            scale = torch.tensor(1.0) if len(shape) == 1 else torch.tensor(shape[-1] ** -0.5)
            turned = drawn.roll(7919 * place)
            values = torch.ones(count) if len(shape) == 1 else turned.repeat(-(-count // len(drawn)))[:count] * scale
            out.write(values.numpy().tobytes())


class Watch:
    """Peaks of RssAnon + RssFile of a process and, apart, of the largest below it; what they read from and wrote to disks."""

    def __init__(self, process: int) -> None:
        self.process, self.peaks, self.disk = process, dict[int, int](), dict[int, tuple[int, int]]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            for process in _below(self.process):
                try:
                    self._note(process)
                except (OSError, ValueError, KeyError):
                    continue  # it has ended

    def _note(self, process: int) -> None:
        status = _fields(f"/proc/{process}/status")
        size = 1024 * sum(int(status[name].split()[0]) for name in ("RssAnon", "RssFile"))
        self.peaks[process] = max(self.peaks.get(process, 0), size)
        io = _fields(f"/proc/{process}/io")
        self.disk[process] = int(io["read_bytes"]), int(io["write_bytes"])


def _fields(file: str) -> dict[str, str]:
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _below(process: int) -> list[int]:
    """A process and all that it started."""
    found, waiting = [], [process]
    while waiting:
        found.append(waiting.pop())
        for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                waiting += map(int, task.read_text(encoding="utf-8").split())
            except OSError:
                continue
    return found


def measured(name: str, memory: str, folder: Path, keep: Path | None) -> Row:
    """One audit, both formats, from the command to its end."""
    model = folder / name
    model.mkdir()
    numbers = make(model, SIZES[name])
    torch.save({"input_ids": torch.arange(TOKENS)[None]}, folder / "inputs.pt")
    out = keep or folder / f"audit-{name}"
    command = [sys.executable, "-m", "auditor", f"hf:{model}", "--inputs", str(folder / "inputs.pt")]
    limit = ["--memory", memory] if memory != "none" else []
    before, start = os.times(), time.perf_counter()
    command += [*limit, "--fail-on", "never", "--out", str(out), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watch = Watch(process.pid)
        said, _ = process.communicate()
        watch.end()
    spent = time.perf_counter() - start
    after = os.times()
    if process.returncode:
        raise SystemExit(said)
    record = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    (first, second, *_) = [*sorted(watch.peaks.values(), reverse=True), 0]
    reads, writes = (sum(one[i] for one in watch.disk.values()) for i in (0, 1))
    return {
        "model": name,
        "memory": memory,
        "parameters": numbers,
        "weights GB": 4 * numbers / 1e9,
        "peak GB": first / 1e9,
        "other GB": second / 1e9,
        "CPU s": after.children_user + after.children_system - before.children_user - before.children_system,
        "s": spent,
        "read GB": reads / 1e9,
        "written GB": writes / 1e9,
        "stages": record["environment"]["seconds"],
        "said": record["environment"].get("held"),
        "plans": {key: (plan["verification"] or {}).get("measured_error") for key, plan in record["plans"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=list(SIZES), metavar="SIZE", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--memory", default="4GB", help="what each may hold, none for as much as it takes")
    parser.add_argument("--folder", type=Path, help="where models and audits go, a temporary folder unless given")
    asked = parser.parse_args()
    rows: list[Row] = []
    for name in asked.sizes:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            rows.append(measured(name, asked.memory, Path(folder), None))
    report("streaming", rows, COLUMNS)


if __name__ == "__main__":
    main()
