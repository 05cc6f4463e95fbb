"""Whole audits of small and large models, in two states of the auditor: what they cost, and whether they say the same.

python -m benchmarks.audits run before --root CHECKOUT     # an older checkout; this file audits with its auditor
python -m benchmarks.audits run after
python -m benchmarks.audits compare before after --name audits   # prints the table and writes results/audits.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LIMIT = 900
"""Seconds after which an audit is given up."""

COLUMNS = {
    "model": "",
    "operations": "",
    "forward s": ".3f",
    "before s": ".1f",
    "after s": ".1f",
    "ratio": ".1f",
    "verdicts": "d",
    "contributions": ".1e",
    "plans": "d",
    "plan errors": ".1e",
    "recommended": "",
}


def models() -> dict[str, Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """{name: builder of a model in eval mode, its arguments and keywords}, the same every time."""
    from benchmarks.subjects import MODELS, build
    from tests.architectures import zoo

    found: dict[str, Any] = {}
    for name in zoo.ZOO:
        found[f"{name}, tiny"] = partial(_specimen, name)
    for name in ("mobilenetv3_small_100", "edgenext_xx_small"):
        found[name] = partial(_timm, name)
    for name in ("albert", "gemma3", "mt5", "rwkv"):
        found[f"{name}, tiny"] = partial(_language, name)
    for file in sorted(HERE.glob("examples/[0-9]*.py")):
        found[f"example {file.stem}"] = partial(_example, file)
    found["gru, 1,000 steps"] = _gru
    for name in MODELS:
        found[name] = lambda name=name: (*build(name), {})
    return found


def _specimen(name: str) -> Any:
    from tests.architectures.zoo import specimen

    one = specimen(name)
    return one.model, one.args, one.kwargs


def _timm(name: str) -> Any:
    import timm
    import torch

    return timm.create_model(name, pretrained=False, num_classes=10).eval(), (torch.randn(2, 3, 96, 96),), {}


def _example(file: Path) -> Any:
    from auditor.loading import load

    subject = load(str(file))
    args, kwargs = subject.batches[0]
    return subject.model, args, kwargs


def _gru() -> Any:
    import torch

    return torch.nn.GRU(64, 64, 2, bidirectional=True).eval(), (torch.randn(1000, 4, 64),), {}


def _language(name: str) -> Any:
    import torch
    import transformers as t

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    makers: dict[str, Callable[[], Any]] = {
        "albert": lambda: t.AlbertModel(t.AlbertConfig(**sizes, **depth, embedding_size=16)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**sizes, **depth, **heads)),
        "mt5": lambda: t.MT5ForConditionalGeneration(
            t.MT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ),
        "rwkv": lambda: t.RwkvForCausalLM(
            t.RwkvConfig(**sizes, context_length=32, num_hidden_layers=2, attention_hidden_size=32)
        ),
    }
    model, tokens = makers[name]().eval(), torch.randint(3, 64, (2, 12))
    return model, (), {"input_ids": tokens} | ({"decoder_input_ids": tokens[:, :6]} if name == "mt5" else {})


def audited(name: str, root: Path) -> dict[str, Any]:
    """One audit in this process, by the auditor of a checkout: processor seconds, and what both files hold."""
    sys.path.insert(0, str(root))
    import torch

    import auditor

    assert Path(auditor.__file__).is_relative_to(root), auditor.__file__
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, args, kwargs = models()[name]()
    forward = min(_timed(lambda: _run(model, args, kwargs)) for _ in range(4))
    found: list[Any] = []
    spent = _timed(lambda: found.append(auditor.audit(model, args, kwargs=kwargs, device="cpu")))
    plan, measured = found[0].to_json(), getattr(found[0], "to_measurements", dict)()  # one document in older ones
    return {"forward": forward, "seconds": spent, "stages": found[0].seconds, "plan": {**measured, **plan}}


def _run(model: Any, args: Any, kwargs: Any) -> None:
    import torch

    with torch.no_grad():
        model(*args, **kwargs)


def _timed(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def run(directory: Path, root: Path, names: list[str]) -> None:
    """Audit the models, each in a process of its own, and keep what each said."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names or list(models()):
        command = [sys.executable, str(Path(__file__).resolve()), "one", name, "--root", str(root)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{HERE}"}
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
        )
        line = (done.stdout.strip().splitlines() or ["{}"])[-1]
        (directory / f"{name}.json").write_text(line if not done.returncode else "{}", encoding="utf-8")
        print(name, "done" if not done.returncode else done.stderr.strip().splitlines()[-1:], flush=True)


def compare(before: Path, after: Path, name: str) -> None:
    """One row a model that both have: cost, how many verdicts and plans' scopes differ, and the largest relative change
    of a contribution and of a plan's predicted or measured error."""
    from benchmarks.harness import report

    rows = []
    for file in sorted(after.glob("*.json")):
        old, new = (
            json.loads((d / file.name).read_text()) if (d / file.name).exists() else {} for d in (before, after)
        )
        if old and new:
            rows.append(_row(file.stem, old, new))
    report(name, rows, COLUMNS)


def _row(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    a, b = old["plan"], new["plan"]
    same = a["recommended"] == b["recommended"]
    return {
        "model": name,
        "operations": f"{len(a['nodes'])}, {len(b['nodes'])}",
        "forward s": min(old["forward"], new["forward"]),
        "before s": old["seconds"],
        "after s": new["seconds"],
        "ratio": old["seconds"] / new["seconds"],
        "verdicts": _verdicts(a, b),
        "contributions": max(_contributions(a, b), default=0.0),
        "plans": sum(a["plans"][name]["scopes"] != plan["scopes"] for name, plan in b["plans"].items()),
        "plan errors": max(_changes(a, b), default=0.0),
        "recommended": str(b["recommended"]) if same else f"{a['recommended']}, {b['recommended']}",
    }


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[float]:
    for name, plan in b["plans"].items():
        for key in ("predicted_error", "measured_error"):
            yield _change(a["plans"][name][key], plan[key])


def _contributions(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[float]:
    ours, theirs = _by_place(a), _by_place(b)
    for key in ours.keys() & theirs.keys():
        for fmt in ("fp16", "bf16"):
            yield _change(ours[key][fmt]["contribution"], theirs[key][fmt]["contribution"])


def _change(x: float | None, y: float | None) -> float:
    """Relative; infinite where one of the two is missing or not finite."""
    if x is None or y is None:
        return float("inf") if x is not y else 0.0
    return abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0


def _verdicts(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """How many of the operations that both have are judged differently in some format."""
    ours, theirs = _by_place(a), _by_place(b)
    shared = ours.keys() & theirs.keys()
    return sum(ours[key][fmt]["verdict"] != theirs[key][fmt]["verdict"] for key in shared for fmt in ("fp16", "bf16"))


def _by_place(plan: Mapping[str, Any]) -> dict[tuple[str, str, int], Any]:
    seen: dict[tuple[str, str], int] = {}
    found = {}
    for node in plan["nodes"]:
        packet = node["op"].split(".")[1] if "." in node["op"] else node["op"]
        key = (node["owner"], "batch_norm" if "batch_norm" in packet else packet)
        found[(*key, seen.setdefault(key, 0))] = node
        seen[key] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "one", "compare"))
    parser.add_argument("what", nargs="*", help="run DIRECTORY [MODEL ...] | compare BEFORE AFTER")
    parser.add_argument("--root", type=Path, default=HERE, help="the checkout whose auditor runs")
    parser.add_argument("--name", default="audits", help="of the file under results/ that compare writes")
    options = parser.parse_args()
    if options.action == "one":
        print(json.dumps(audited(options.what[0], options.root.resolve())))
    elif options.action == "run":
        run(Path(options.what[0]), options.root.resolve(), options.what[1:])
    else:
        compare(Path(options.what[0]), Path(options.what[1]), options.name)


if __name__ == "__main__":
    main()
