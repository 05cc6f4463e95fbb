"""Golden audits: what the auditor says of some two hundred models, frozen, and what a later state of it says differently.

python -m benchmarks.golden run NOW.json.gz [MODEL ...]            # MODEL: a name, or a group such as "corpus"
python -m benchmarks.golden compare [BEFORE.json.gz] NOW.json.gz   # without BEFORE: results/golden.json.gz, the frozen ones

`run --root CHECKOUT` audits with the auditor of another checkout. `--packages DIR`: where the packages of the trained
models are (`trained_models.PACKAGES`). `compare` prints every difference beyond the limits, and fails where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
FROZEN = Path(__file__).resolve().parent / "results" / "golden.json.gz"
LIMIT = 900
"""Seconds after which an audit is given up."""

NEAR = 0.05
"""How near to a threshold, relatively, an error lies whose verdict may change."""
DIGITS = 1e-3
"""Largest relative change of a plan's measured error that is none."""
DEARER = 0.01
"""Largest share by which the recommended plan may become dearer in predicted time."""
DEAR, LARGE = 1.3, 1.2
"""Most that processor time and peak memory may grow by."""

Row = dict[str, Any]
Build = Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]

TIMM = (
    "beit cait coat convmixer convnext crossvit densenet efficientnet ghostnet hrnet maxxvit mlp_mixer mobilenetv3 "
    "nfnet pvt_v2 regnet resnest resnetv2 swin_transformer vision_transformer"
).split()
TRANSFORMERS = (
    "albert bart bert bloom deberta-v2 distilbert electra funnel gpt2 gpt_neox layoutlm llama mamba mixtral mobilevit "
    "opt roberta t5 wav2vec2 xlnet"
).split()
"""Forty families that libraries ship: see families/."""


def models() -> dict[str, tuple[str, Build]]:
    """{name: (group, builder of a model in eval mode, its arguments and keywords)}, the same every time."""
    import benchmarks.subjects as timed  # lets timm and others see a torchvision without operators
    from benchmarks.trained_models import TRAINED
    from tests.architectures import zoo
    from tests.corpus.catalogue import INFERENCE
    from tests.corpus.traps import TRAPS

    found: dict[str, tuple[str, Build]] = {}
    for file in sorted(HERE.glob("examples/[0-9]*.py")):
        found[f"example {file.stem}"] = "examples", partial(_example, file)
    for case in INFERENCE:
        found[case.name] = "corpus", partial(_plain, case.build)
        found[f"{case.name} (twin)"] = "corpus", partial(_plain, case.twin)
    for trap in TRAPS:
        found[f"{trap.name} (trap)"] = "corpus", partial(_plain, trap.build)
    for name, build in TRAINED.items():
        found[f"{name}, trained"] = "trained", partial(_plain, build)
    for name in zoo.ZOO:
        found[f"{name}, tiny"] = "architectures", partial(_specimen, name)
    for library, names in (("timm", TIMM), ("transformers", TRANSFORMERS)):
        for name in names:
            found[f"{library}/{name}"] = "families", partial(_family, library, name)
    for name in (*timed.MODELS, *timed.SMALL):
        found[name] = "timed", partial(_plain, partial(timed.build, name))
    found["gru, 1,000 steps"] = "timed", _gru
    found["gpt, 6,000 operations"] = "timed", partial(_plain, partial(timed.gpt, 200, 16, 8))
    return found


def _plain(build: Callable[[], Any]) -> Any:
    model, args, *_ = build()
    return model.eval(), args, {}


def _specimen(name: str) -> Any:
    from tests.architectures.zoo import specimen

    one = specimen(name)
    return one.model, one.args, one.kwargs


def _family(library: str, name: str) -> Any:
    from benchmarks import families

    return families.library(library).build(name)


def _example(file: Path) -> Any:
    from auditor.loading import load

    subject = load(str(file))
    args, kwargs = subject.batches[0]
    return subject.model, args, kwargs


def _gru() -> Any:
    import torch

    return torch.nn.GRU(64, 64, 2, bidirectional=True).eval(), (torch.randn(1000, 4, 64),), {}


def audited(name: str) -> Row:
    """One audit in this process: what it says, processor seconds, and its peak memory (MiB, the largest process)."""
    import torch

    import auditor
    from auditor.errors import AuditorError

    group, build = models()[name]
    torch.manual_seed(0)
    model, args, kwargs = build()
    start = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        audit = auditor.audit(model, args, kwargs=kwargs, device="cpu")
    except AuditorError as error:
        return {"model": name, "group": group, "refused": error.slug}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = children.ru_utime + children.ru_stime - start[1].ru_utime - start[1].ru_stime
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "model": name,
        "group": group,
        "seconds": time.process_time() - start[0] + spent,
        "peak": peak / 1024,
        "recommended": audit.recommended,
        "plans": {plan.name: _plan(plan) for plan in audit.plans.values()},
        "operations": _operations(audit),
        "findings": sorted({finding.rule for finding in audit.findings}),
    }


def _plan(plan: Any) -> Row:
    return {
        "fp32": sorted(path for path, scope in plan.scopes.items() if scope.precision == "fp32"),
        "functions": sorted(f"{path}: {name}" for path, name in plan.exceptions),
        "low": plan.low_precision_flops,
        "faster": plan.predicted_speedup,
        "predicted": plan.predicted_error,
        "measured": plan.measured_error,
        "verified": plan.is_verified,
    }


def _operations(audit: Any) -> list[list[Any]]:
    """[owner, kind, how many before it are like it, {format: [verdict, contribution]}] of every operation."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for report in audit.nodes:
        node = report.node
        kind = node.op.split(".")[1] if "." in node.op else node.op
        key = (node.owner, "batch_norm" if "batch_norm" in kind else kind)
        effects = {fmt: moved.isolated for fmt, moved in report.contributions.items()}
        judged = {
            fmt: [one.verdict, effects[fmt] if math.isfinite(effects.get(fmt, math.inf)) else None]
            for fmt, one in report.verdicts.items()
        }
        found.append([*key, seen.setdefault(key, 0), judged])
        seen[key] += 1
    return found


def run(file: Path, root: Path, wanted: list[str]) -> None:
    """Audit the models with the auditor of `root`, each in a process forked for it, and write what each said."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{HERE}"}
    sys.path.insert(0, str(root))
    import torch

    import auditor

    assert Path(auditor.__file__).is_relative_to(root), auditor.__file__
    torch.set_num_threads(1)
    chosen = [name for name, (group, _) in models().items() if not wanted or {name, group} & set(wanted)]
    rows = []
    for name in chosen:
        rows.append(row := _apart(name))
        print(
            name, {key: row[key] for key in ("seconds", "refused", "failed") if key in row}, file=sys.stderr, flush=True
        )
    _write(file, rows)


def _apart(name: str) -> Row:
    """The audit of one model, in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, name))
    process.start()
    theirs.close()
    try:
        row: Row = ours.recv() if ours.poll(LIMIT) else {"model": name, "failed": f"{LIMIT} s are over"}
    except EOFError:
        row = {"model": name, "failed": "the process ended"}
    process.kill()
    process.join()
    return row


def _send(pipe: Any, name: str) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        try:
            row = audited(name)
        except ImportError as error:  # a package that is not installed
            row = {"model": name, "failed": str(error)}
        except Exception as error:  # what an audit should not raise; it is part of what it says
            row = {"model": name, "failed": f"{type(error).__name__}: {error}"}
    pipe.send(row)


def _write(file: Path, rows: list[Row]) -> None:
    from benchmarks.harness import machine

    with gzip.GzipFile(file, "wb", mtime=0) as out:
        out.write(json.dumps({"machine": machine(), "rows": rows}).encode())


def _read(file: Path) -> dict[str, Row]:
    return {row["model"]: row for row in json.loads(gzip.decompress(file.read_bytes()))["rows"]}


def compare(before: dict[str, Row], after: dict[str, Row]) -> bool:
    """Print what is said otherwise, and what it costs. Returns whether every limit holds."""
    from benchmarks.harness import described, machine

    apart = [line for name in after if name in before for line in differences(before[name], after[name])]
    both = [(before[name], after[name]) for name in after if name in before and "seconds" in before[name]]
    both = [(a, b) for a, b in both if "seconds" in b]
    print(f"{len(both)} audits, {described(machine())}\n")
    print(*apart, sep="\n")
    plans = sum(len(b["plans"]) for _, b in both)
    same = sum(
        a["plans"].get(name, {}).get("fp32") == plan["fp32"] for a, b in both for name, plan in b["plans"].items()
    )
    print(f"\n{same} of {plans} plans are the same; {len(apart)} differences beyond the limits\n")
    print("| model | seconds before | after | ratio | MiB before | after | ratio |\n|---|---|---|---|---|---|---|")
    dear = False
    for a, b in both:
        if b["group"] == "timed":
            time_, space = b["seconds"] / a["seconds"], b["peak"] / a["peak"]
            dear |= time_ > DEAR or space > LARGE
            seconds = f"{a['seconds']:.1f} | {b['seconds']:.1f} | {time_:.2f}"
            print(f"| {b['model']} | {seconds} | {a['peak']:.0f} | {b['peak']:.0f} | {space:.2f} |")
    total = [sum(row["seconds"] for row in rows) for rows in zip(*both, strict=True)] if both else [0.0, 0.0]
    print(f"\nall: {total[0]:.0f} s before, {total[1]:.0f} s after")
    return not apart and not dear


def differences(a: Row, b: Row) -> Iterator[str]:
    """What of one model is said otherwise, beyond the limits."""
    name = b["model"]
    if "plans" not in a or "plans" not in b:
        if (old := a.get("refused") or a.get("failed")) != (new := b.get("refused") or b.get("failed")):
            yield f"{name}: {old or 'audited'} -> {new or 'audited'}"
        return
    ours, theirs = _by_place(a), _by_place(b)
    for place in ours.keys() & theirs.keys():
        for fmt in ours[place].keys() & theirs[place].keys():
            (was, x), (is_, y) = ours[place][fmt], theirs[place][fmt]
            if was != is_ and not _near_threshold(x, y):
                yield f"{name}: {fmt} {' '.join(map(str, place))}: {was} ({x}) -> {is_} ({y})"
    for plan in sorted(a["plans"].keys() | b["plans"].keys()):
        yield from (f"{name}: {plan}: {line}" for line in _of_plan(a["plans"].get(plan), b["plans"].get(plan)))
    if a["recommended"] != b["recommended"]:
        yield f"{name}: recommended {a['recommended']} -> {b['recommended']}"
    if a["findings"] != b["findings"]:
        yield f"{name}: findings {sorted(set(a['findings']) ^ set(b['findings']))}"


def _of_plan(old: Row | None, new: Row | None) -> Iterator[str]:
    if old is None or new is None:
        yield "missing" if new is None else "new"
        return
    if old["verified"] != new["verified"]:
        yield f"verified {old['verified']} -> {new['verified']}"
    if old["faster"] > new["faster"] * (1 + DEARER):
        yield f"predicted speedup {old['faster']:.4g} -> {new['faster']:.4g}"
    equal = old["fp32"] == new["fp32"] and old["functions"] == new["functions"]
    if equal and _change(old["measured"], new["measured"]) > DIGITS:
        yield f"measured error {old['measured']} -> {new['measured']}"


def _by_place(row: Row) -> dict[tuple[Any, ...], Any]:
    return {tuple(place): judged for *place, judged in row["operations"]}


def _near_threshold(x: float | None, y: float | None) -> bool:
    """Whether two contributions are so much alike that a threshold between them explains another verdict."""
    return x is not None and y is not None and _change(x, y) < NEAR


def _change(x: float | None, y: float | None) -> float:
    """Relative; infinite where one of the two is missing or not finite."""
    if x is None or y is None:
        return float("inf") if x is not y else 0.0
    return abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "compare"))
    parser.add_argument("what", nargs="+", help="run FILE [MODEL ...] | compare [BEFORE] AFTER")
    parser.add_argument("--root", type=Path, default=HERE, help="the checkout whose auditor runs")
    parser.add_argument("--packages", metavar="DIR", default="", help="where the packages of the trained models are")
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    if options.action == "run":
        run(Path(options.what[0]), options.root.resolve(), options.what[1:])
    else:
        *before, after = map(Path, options.what)
        sys.exit(not compare(_read(before[0] if before else FROZEN), _read(after)))


if __name__ == "__main__":
    main()
