"""Read by Python as it starts where this folder is first on its path: the process that verifies plans has the pretend GPU, too."""

import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]

runpy.run_path(str(TESTS / "stubs" / "sitecustomize.py"))
sys.path.append(str(TESTS.parent))

from tests.pretend_gpu.start import start  # noqa: E402

start()
