"""Loads the models to run: `patched_model.py` under a plan, an exported program, or an ONNX model."""

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
from ..isolation import isolate
from ..records import Plan
from .running import FP32, TODAY

PROGRAM, ONNX = ".pt2", ".onnx"
"""File suffixes of a plan's exported program and ONNX model."""

AS_IT_IS = ".rounded"
"""Suffix of a plan's name: its ONNX model runs without graph optimizations, exactly as stored."""

PROVIDER = "CPUExecutionProvider"

CRASHES = ("FuseFp16InitializerToFp32NodeTransformer",)
"""Optimizations that end the process of onnxruntime 1.32 on a CPU, for recurrent layers in FP16."""

_NAMES = {"tensor(float16)": torch.float16, "tensor(bfloat16)": torch.bfloat16}


@contextmanager
def patch_model(
    model: nn.Module, plans: Collection[str], apply: Callable[[nn.Module, str], object], plan: str
) -> Iterator[nn.Module]:
    """In the `with` block, the model follows a plan; for FP32 and TODAY it is in FP32, even with low-precision weights.
    After the block, the model is restored."""
    name = FP32 if plan == TODAY else plan
    with isolate(model):
        if name != FP32 or FP32 in plans:
            apply(model, name)
        yield model


def in_hand(model: nn.Module, plans: Mapping[str, Plan], plan: str) -> AbstractContextManager[nn.Module]:
    """The context manager `patch_model` for Plan objects, without a patched_model.py."""
    return patch_model(model, plans, lambda model, name: apply_plan(model, plan_table(plans[name])), plan)


def load_program(folder: Path, device: str, plan: str) -> AbstractContextManager[nn.Module]:
    """A context manager that returns the exported program or ONNX model that the folder contains for a plan."""
    if (file := folder / f"{plan}{ONNX}").exists():
        return nullcontext(_OnnxModel(file))
    return nullcontext(ProgramModule(torch.export.load(folder / f"{plan}{PROGRAM}").module().to(device)))


class ProgramModule(nn.Module):
    """Calls an exported program. Outputs of a user-defined class become an object with equal names as attributes and
    keys."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; return its outputs."""
        output = self.program(*args, **kwargs)
        return _NamedOutputs(output) if type(output) is dict else output

    def train(self, mode: bool = True) -> ProgramModule:
        """Does nothing: torch does not allow programs to change mode."""
        return self


class _NamedOutputs(dict[Any, Any]):
    """A dict of outputs that also allows access by attribute and position, like most output classes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the program has no output {name!r}, only {', '.join(map(str, self))}") from None

    def __getitem__(self, key: Any) -> Any:
        by_place = isinstance(key, slice) or (isinstance(key, int) and key not in self.keys())
        return list(self.values())[key] if by_place else super().__getitem__(key)


class _OnnxModel(nn.Module):
    """Runs an ONNX model with onnxruntime; inputs are cast to the model's dtypes, floating-point outputs to FP32."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if file.stem.endswith(AS_IT_IS):
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(
            str(file), options, providers=[PROVIDER], disabled_optimizers=[*CRASHES]
        )

    def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Run the model on onnxruntime's CPU provider; return its outputs."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        inputs = dict[str, Any]()
        outputs = list[torch.Tensor]()
        with _disable_current_modes():
            for port, x in zip(self.session.get_inputs(), given, strict=True):
                dtype = _NAMES.get(port.type, x.dtype)
                inputs[port.name] = _to_numpy(x.to(dtype).cpu())
            for value in self.session.run_with_ort_values(None, inputs):
                is_bf16 = value.data_type() == "tensor(bfloat16)"  # which NumPy lacks
                x = from_dlpack(value) if is_bf16 else torch.from_numpy(value.numpy())
                outputs.append(x.float() if x.dtype in _NAMES.values() else x)
        return outputs


def _to_numpy(x: torch.Tensor) -> Any:
    """Convert a tensor to a value of onnxruntime; NumPy has no BF16, so BF16 bits are passed as another type."""
    from onnx import TensorProto
    from onnxruntime import OrtValue

    x = x.contiguous()
    if x.dtype is torch.bfloat16:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(torch.uint16).numpy(), TensorProto.BFLOAT16)
    return OrtValue.ortvalue_from_numpy(x.numpy())
