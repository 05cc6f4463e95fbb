"""The process of one step: `python -m benchmarks.gpu.child STEP FILE DEVICE [--small] [--cases DIR]`; FILE has a row after each."""

from __future__ import annotations

import argparse
import json
import runpy
import time
from pathlib import Path

from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.steps import BY_NAME, Asked, Row


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.child")
    parser.add_argument("step", choices=BY_NAME)
    parser.add_argument("file", type=Path)
    parser.add_argument("device")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cases", default="")
    given = parser.parse_args()
    runpy.run_path(str(ROOT / "tests" / "stubs" / "sitecustomize.py"))
    if given.device == "pretend":
        from tests.pretend_gpu.start import start

        start()
    rows: dict[str, Row] = json.loads(given.file.read_text(encoding="utf-8")) if given.file.exists() else {}
    for name, make in BY_NAME[given.step].items(Asked(given.device, given.small, given.cases)):
        if name in rows:
            continue
        begun = time.perf_counter()
        try:
            row = make()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:600]}
        rows[name] = {**row, "took": round(time.perf_counter() - begun, 2)}
        unfinished = given.file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(rows), encoding="utf-8")
        unfinished.replace(given.file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
