"""What is run in the model's place: the model under a plan of `patched_model.py`, an exported program, an ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import from_dlpack

from ..artefact.applying import apply_plan
from ..artefact.base import plan_table
from ..isolation import isolated
from ..records import Plan
from .running import FP32, TODAY

PROGRAM, ONNX = ".pt2", ".onnx"
"""What the names of files end with that hold a plan of the name before."""

AS_IT_IS = ".rounded"
"""What names of plans end with that an ONNX model runs operation by operation, as the file has them."""

PROVIDER = "CPUExecutionProvider"

_NAMES = {"tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16}


@contextmanager
def patched(
    model: nn.Module, plans: Collection[str], apply: Callable[[nn.Module, str], object], plan: str
) -> Iterator[nn.Module]:
    """The model under one of the plans, or in FP32, where what is stored low is raised; it is then as it was."""
    name = FP32 if plan == TODAY else plan
    with isolated(model):
        if name != FP32 or FP32 in plans:
            apply(model, name)
        yield model


def in_hand(model: nn.Module, plans: Mapping[str, Plan], plan: str) -> AbstractContextManager[nn.Module]:
    """The same of plans that are in no file."""
    return patched(model, plans, lambda model, name: apply_plan(model, plan_table(plans[name])), plan)


def load_program(folder: Path, device: str, plan: str) -> AbstractContextManager[nn.Module]:
    """The program or the ONNX model that lies in the folder under a plan's name."""
    if (file := folder / f"{plan}{ONNX}").exists():
        return nullcontext(_OnnxModel(file))
    return nullcontext(Standing(torch.export.load(folder / f"{plan}{PROGRAM}").module().to(device)))


class Standing(nn.Module):
    """Calls a program. What the model returns in a class of its own has its names here: as attributes, keys and in order."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the program returns."""
        output = self.program(*args, **kwargs)
        return _NamedOutputs(output) if type(output) is dict else output

    def train(self, mode: bool = True) -> Standing:
        """Nothing: a program is what it was exported as, and torch lets nobody switch it."""
        return self


class _NamedOutputs(dict[Any, Any]):
    """Outputs by name, as most classes of outputs have them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the program has no output {name!r}: {', '.join(map(str, self))}") from None

    def __getitem__(self, key: Any) -> Any:
        by_place = isinstance(key, slice) or (isinstance(key, int) and key not in self.keys())
        return list(self.values())[key] if by_place else super().__getitem__(key)


class _OnnxModel(nn.Module):
    """Calls onnxruntime; inputs are cast to what the model takes, floating outputs raised to FP32."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if file.stem.endswith(AS_IT_IS):
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(str(file), options, providers=[PROVIDER])

    def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """What it answers on its CPU provider."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ports = zip(self.session.get_inputs(), given, strict=True)
        with _disable_current_modes():
            fed = {port.name: _to_numpy(x.to(_NAMES.get(port.type, x.dtype)).cpu()) for port, x in ports}
            result = [_from_numpy(x) for x in self.session.run_with_ort_values(None, fed)]
            return [x.float() if x.dtype in _NAMES.values() else x for x in result]


def _to_numpy(x: torch.Tensor) -> Any:
    """A tensor as onnxruntime takes it; NumPy has no BF16, whose bits go by another name."""
    from onnx import TensorProto
    from onnxruntime import OrtValue

    x = x.contiguous()
    if x.dtype is torch.bfloat16:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(torch.uint16).numpy(), TensorProto.BFLOAT16)
    return OrtValue.ortvalue_from_numpy(x.numpy())


def _from_numpy(value: Any) -> torch.Tensor:
    return from_dlpack(value).clone() if value.data_type() == "tensor(bfloat16)" else torch.from_numpy(value.numpy())
