"""What PyTorch's own tests expect of its operations on CUDA and on a CPU: OpInfo, for a GPU of compute capability 8.0 or more.

`python -m tests.support.opinfo` prints it as JSON. It is read in a process of its own: importing those tests sets flags of torch's.
"""

import json
import os
import subprocess
import sys
import types
import unittest
from functools import cache
from pathlib import Path
from typing import Any

HALVES = ("fp16", "bf16")
_TYPES = {"float16": "fp16", "bfloat16": "bf16"}

Known = dict[str, list[dict[str, list[str]]]]


@cache
def infos() -> Known:
    """{ATen packet: for each of its variants the low formats that it takes, {"cuda": [...], "cpu": [...]}}.

    Of operations on float32 numbers that have a packet of their own.
    """
    if "OPINFO" not in os.environ:  # where the processes that start here find it, too
        root = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tests.support.opinfo"]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
        os.environ["OPINFO"] = done.stdout
    return json.loads(os.environ["OPINFO"])


def has_half(packet: str, fmt: str, device: str = "cuda") -> bool | None:
    """Whether one of its variants takes tensors of a format; None of an operation that OpInfo does not know."""
    known = infos().get(packet)
    return None if known is None else any(fmt in variant[device] for variant in known)


def _read() -> Known:
    import torch

    found: Known = {}
    for info in _op_db():
        names = {info.aten_name.removeprefix("nn.functional."), info.name.replace(".", "_")}
        for name in sorted(name.removeprefix("nn_functional_") for name in names):
            if hasattr(torch.ops.aten, name) and torch.float32 in info.dtypesIfCUDA:
                found.setdefault(name, []).append({"cuda": _low(info.dtypesIfCUDA), "cpu": _low(info.dtypes)})
    return found


def _low(dtypes: Any) -> list[str]:
    names = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return sorted(_TYPES[name] for name in names if name in _TYPES)


def _op_db() -> list[Any]:
    """Its lists ask which GPU is there: they are read as on one that has everything."""
    try:
        import expecttest  # noqa: F401
    except ImportError:  # with which torch's own tests compare texts; nothing of it is called here
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal import common_cuda

    flags = [name for name in vars(common_cuda) if name.startswith("SM") and name.endswith("OrLater")]
    vars(common_cuda).update(dict.fromkeys(flags, True))
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


if __name__ == "__main__":
    print(json.dumps(_read()))
