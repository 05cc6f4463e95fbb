"""Makes the committed sample report and its picture: `python -m tests.browser.sample`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser.devtools import browser

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "reports" / "samples"
NAME = "03_handwritten_transformer"
WIDTH, HEIGHT = 1280, 1130


def main() -> None:
    """Audit the example in a copy of it, so that the report names no folder of this machine, and open the report."""
    SAMPLES.mkdir(exist_ok=True)
    page = SAMPLES / f"{NAME}.html"
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT / "examples", Path(scratch, "examples"))
        command = [sys.executable, "-m", "auditor", f"examples/{NAME}.py", "--fail-on", "never", "-q"]
        subprocess.run(command, cwd=scratch, env=_environment(), check=True)
        text = Path(scratch, "audits", NAME, "report.html").read_text(encoding="utf-8")
        page.write_text(text.replace(f"{Path(scratch).resolve()}/", ""), encoding="utf-8")
    with browser() as opened:
        opened.open(page, width=WIDTH, height=HEIGHT, scheme="light")
        page.with_suffix(".png").write_bytes(opened.screenshot())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    main()
