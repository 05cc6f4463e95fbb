"""What results are of: the device and its libraries, the versions, the state of the code; and what is missing here."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OPTIONAL = {"pytest": "tests", "transformers": "architectures", "timm": "architectures"}
"""{package: the step that needs it}."""

Machine = dict[str, str]


def machine(device: str) -> Machine:
    """Device, driver, CUDA, cuDNN, torch, Python, and the code, by what its files hold: a copy need not be a repository."""
    import torch

    kind = torch.get_device_module(device)
    return {
        "device": str(kind.get_device_name()),
        "driver": _driver(),
        "cuda": str(torch.version.cuda or ""),
        "cudnn": str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
        "python": platform.python_version(),
        "code": _code(),
    }


def folder_of(found: Machine) -> str:
    """What the results of a device and a version of torch are kept under."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{found['device']} torch {found['torch']}").strip("-").lower()


def lacking() -> list[str]:
    """Packages without which nothing here runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [re.split(r"[^A-Za-z0-9_-]", text)[0] for text in project["dependencies"]]
    return [name for name in needed if importlib.util.find_spec(name) is None]


def without() -> dict[str, str]:
    """Of the packages that single steps need, those that are not here."""
    return {name: step for name, step in OPTIONAL.items() if importlib.util.find_spec(name) is None}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def _code() -> str:
    digest = hashlib.sha256()
    for file in sorted((ROOT / "auditor").rglob("*")):
        if file.suffix in (".py", ".toml"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
