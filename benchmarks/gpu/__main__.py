"""`python -m benchmarks.gpu`: every step within its limit of time; what is done for this device, torch and code is not done again."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import ROOT, Machine, folder_of, lacking, machine, without
from benchmarks.gpu.summary import summary

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SITE = ROOT / "tests" / "pretend_gpu" / "site"

Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 where every step was done, 1 where one was cut short or ended, 2 where nothing can run."""
    if absent := lacking():
        print(
            f"python -m benchmarks.gpu needs {', '.join(absent)}, which {sys.executable} lacks: install them",
            file=sys.stderr,
        )
        return 2
    from benchmarks.gpu.steps import BY_NAME, STEPS

    given = _parser(list(BY_NAME)).parse_args(arguments)
    unknown = [name for name in given.only if name not in BY_NAME]
    if unknown:
        print(f"steps are {', '.join(BY_NAME)}, not {', '.join(unknown)}", file=sys.stderr)
        return 2
    device = _device(given.device)
    pretend = device == "pretend"
    for package, needing in without().items():
        print(f"{package} is not installed: the step {needing!r} says so in place of results")
    found = machine(device)
    where = _folder(given.results, found, pretend)
    print(f"{found['device']}, torch {found['torch']}, code {found['code']}: {where}")
    for step in STEPS:
        if given.only and step.name not in given.only:
            continue
        command = [step.name, str(where / f"{step.name}.rows"), device]
        command += ["--small"] if given.small or pretend else []
        command += ["--cases", given.cases] if given.cases else []
        limit = given.limit or step.limit
        run_step(where / f"{step.name}.json", command, limit, found, _environment(step.environment, pretend))
    results = {step.name: _read(where / f"{step.name}.json") for step in STEPS}
    (where / "summary.md").write_text(summary(found, results), encoding="utf-8")
    print(where / "summary.md")
    asked = [results[name] for name in given.only or BY_NAME]
    return 0 if all(result and result["status"] == "done" for result in asked) else 1


def _parser(steps: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("only", nargs="*", help=f"of these steps: {', '.join(steps)}")
    parser.add_argument("--device", default="auto", help="cuda, or pretend: the GPU of the tests, which is none")
    parser.add_argument("--small", action="store_true", help="a few small rows of every step")
    parser.add_argument("--limit", type=int, help="seconds of every step")
    parser.add_argument("--cases", default="", help="a folder of files to audit beside the examples")
    parser.add_argument("--results", type=Path, help=f"a folder; {RESULTS.relative_to(ROOT)} unless given")
    return parser


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "pretend"
    if asked == "pretend":
        print("torch sees no GPU: the command is tried out on the pretend GPU of the tests, on small models")
        sys.path.insert(0, str(ROOT))
        from tests.pretend_gpu.start import start

        start()
    return asked


def _folder(asked: Path | None, found: Machine, pretend: bool) -> Path:
    """Results of the pretend GPU are none of a GPU: they go to a temporary folder unless somebody says where."""
    base = asked or (Path(tempfile.mkdtemp(prefix="auditor-gpu-")) if pretend else RESULTS)
    where = base / folder_of(found)
    where.mkdir(parents=True, exist_ok=True)
    return where


def _environment(more: Mapping[str, str], pretend: bool) -> dict[str, str]:
    paths = [*([str(SITE)] if pretend else []), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **offline, **more}


def run_step(file: Path, command: list[str], limit: int, found: Machine, environment: Mapping[str, str]) -> None:
    """One step in a process of its own; goes on where it was cut short, begins anew where machine or code are others."""
    name, rows = command[0], Path(command[1])
    known, asked = _read(file), command[2:]
    same = known is not None and known["machine"] == found and known["asked"] == asked
    if known is not None and same and known["status"] == "done":
        print(f"{name}: done before")
        return
    if not same:
        rows.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
    begun = time.perf_counter()
    status, said = run_child(command, limit, environment)
    made = json.loads(rows.read_text(encoding="utf-8")) if rows.exists() else {}
    spent = (known["seconds"] if known is not None and same else 0.0) + time.perf_counter() - begun
    result = {
        "status": status,
        "said": said,
        "seconds": round(spent, 1),
        "machine": found,
        "asked": asked,
        "rows": made,
    }
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if status == "done":
        rows.unlink(missing_ok=True)
    print(f"{name}: {status}, {len(made)} rows, {spent:.0f} s" + (f": {said}" if said else ""), flush=True)


def run_child(command: list[str], limit: int, environment: Mapping[str, str]) -> tuple[str, str]:
    """("done", ""), or how it ended and what it said last."""
    process = [sys.executable, "-m", "benchmarks.gpu.child", *command]
    try:
        done = subprocess.run(
            process, cwd=ROOT, env=dict(environment), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return "cut short", f"its {limit} seconds were over; the same command goes on from there"
    if done.returncode == 0:
        return "done", ""
    lines = done.stderr.strip().splitlines() or [""]
    return "ended", f"exit code {done.returncode}: {lines[-1][:300]}"


def _read(file: Path) -> Result | None:
    if not file.exists():
        return None
    found: Result = json.loads(file.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
