"""Writes `patched_model.py`, which builds and patches the user's model; it needs only torch and the user's source."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Set
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from ..isolation import members
from ..loading import importer, statedicts
from ..numerics import fp32_output, functions
from ..numerics.formats import label, runs
from ..records import Origin, Plan
from . import applying as runtime
from . import entrances, source
from . import runtime as strategies_runtime
from .base import plan_table
from .runtime import Runtime
from .strategies import SHIPPED, strategy_of
from .text import literal

_HEADER = '''"""A PyTorch model in mixed precision: the original model, patched to follow a measured plan.

    import patched_model
    model = patched_model.build()             # the original model under the recommended plan
    model = patched_model.apply(model)        # or: patch an existing model
    model = patched_model.build(plan="...")   # one of PLANS or QUANTIZED

Needs torch and the model's own source, safetensors if its weights are in that format, and torchao for QUANTIZED.

Reading PLANS: a scope is a module; modules inside it have the same precision unless they are listed themselves.
`because` has the codes of the rules that fired and the measured reasons; `cost` is the share of the plan's time (or
memory or flops) that low precision in this scope is predicted to save. `keep` names functions of torch that run in FP32
in a low-precision scope and the modules inside it, in any spelling ("pow": torch.pow, x.pow, x ** 2), except for
in-place calls. A matrix product that reads their result still runs in low precision. `fp32_output` names functions
whose matrix products have low-precision inputs and FP32 output. `gpu_only`: the plan fails
on a CPU with this error; run it on a GPU, or where a GPU is emulated. Errors are relative to FP32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import re
import runpy
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PosixPath, PurePosixPath
from types import ModuleType
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils import _pytree as pytree

'''

_BUILD = '''

def build(*args: Any, plan: str | None = None, **kwargs: Any) -> nn.Module:
    """Build the model from its source (arguments, if any, go to its factory or class) and patch it."""
    return apply(original(*args, **kwargs), plan)


def apply(model: nn.Module, plan: str | None = None) -> nn.Module:
    """Patch an existing model in place. plan: a key of PLANS or QUANTIZED, by default the recommended plan."""
    name = RECOMMENDED if plan is None else plan
    if name not in {**PLANS, **QUANTIZED}:
        raise ValueError(f"no plan {name!r}: choose one of {', '.join([*PLANS, *QUANTIZED])}")
    scopes = [path for each in PLANS.values() for path in each["scopes"]]
    if said := misfit(model, PARAMETERS, STRUCTURE, scopes):
        raise ValueError(said)
    if name in QUANTIZED:
        return runpy.run_path(str(Path(__file__).parent / QUANTIZED[name]))["quantize"](model)
    return apply_plan(model, PLANS[name])


def original(*args: Any, **kwargs: Any) -> nn.Module:
    """The model as built by its own source, in FP32."""
    if SOURCE is None:
        raise ValueError("this plan was made for a model in memory, without a source: use apply(model)")
    return make_original(SOURCE, __file__, args, kwargs)
'''


_FIND = '''def runtime_of(strategy: str) -> type[Runtime]:
    """The class that patches a live module for a strategy."""
    return RUNTIMES[strategy]
'''

_SEPARATED = "\n\n"
_CHOOSE, _NONE = "choose one of {', '.join([*PLANS, *QUANTIZED])}", "no plan of this audit can be applied to a module"


def emit(
    origin: Origin | None,
    parameters: int,
    plans: Mapping[str, Plan],
    recommended: str | None,
    directory: Path,
    structure: str = "",
    quantized: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the text of `patched_model.py`, to be saved in `directory`. All data of the model is written as literals.

    structure: the model's digest from `structure_of`; "" accepts any model. recommended: None if no plan meets the
    error budget; the caller must then pass `plan=`. Plans that torch cannot compute, and exported programs, are only
    named in a comment. quantized: {name of a plan of quantization schemes: its code for torchao, relative to this file}.
    """
    runnable = {name: plan for name, plan in plans.items() if runs(plan.format) and plan.program is None}
    recommended = recommended if recommended in {**runnable, **quantized} else None
    parts = [
        _HEADER,
        f"SOURCE: dict[str, Any] | None = {literal(_source(origin, directory))}\n\n",
        f"PARAMETERS = {parameters}\n\n",
        f"STRUCTURE = {structure!r}\n\n",
        f"RECOMMENDED = {recommended!r}\n\n",
        f"PLANS: dict[str, dict[str, Any]] = {literal({name: _table(plan) for name, plan in runnable.items()})}\n",
        *(_left_out(name, plan) for name, plan in plans.items() if name not in runnable),
        f"\nQUANTIZED: dict[str, str] = {literal(dict(quantized))}\n",
        _BUILD if {**runnable, **quantized} else _BUILD.replace(_CHOOSE, _NONE),
        "\n\n# From here on the code is the same for every model. First: how the original model is built.\n\n",
        _text_from(members, "WRAPPERS = "),
        _SEPARATED,
        _text_from(importer, "_digests: "),
        _SEPARATED,
        _text_from(statedicts, "PREFIXES = "),
        _SEPARATED,
        _text_from(source, "def make_original"),
        "\n\n# How weights are stored, and how a scope runs.\n\n",
        _text_from(functions, "def function_name"),
        _SEPARATED,
        _text_from(fp32_output, "FACTORS = "),
        _SEPARATED,
        _text_from(strategies_runtime, "DTYPES = "),
        _runtimes({plan.strategy for plan in runnable.values()}),
        _text_from(entrances, "DTYPE_METHODS = "),
        _SEPARATED,
        _text_from(runtime, "FUSING = "),
    ]
    return "".join(parts)


def _runtimes(used: Set[str]) -> str:
    """Source of the runtimes that the plans use, and of the function that looks them up."""
    runtimes = {name: strategy_of(name).runtime for name in SHIPPED if name in used}
    lines = (reversed(runtime.__mro__) for runtime in runtimes.values())  # a runtime may inherit from another runtime
    classes = dict.fromkeys(kind for line in lines for kind in line if kind not in (object, Runtime))
    table = "".join(f'    "{name}": {runtime.__name__},\n' for name, runtime in runtimes.items())
    return _SEPARATED.join(
        (
            "",
            *map(inspect.getsource, classes),
            f"RUNTIMES: dict[str, type[Runtime]] = {{\n{table}}}\n",
            _FIND,
            "",
        )
    )


def _left_out(name: str, plan: Plan) -> str:
    if plan.program is not None:
        return f"# {name}: an exported program, torch.export.load({plan.program.file!r}).module()\n"
    return f"# {name}: torch has no arithmetic in {label(plan.format)}, so this plan cannot be run.\n"


def _table(plan: Plan) -> dict[str, Any]:
    """One plan for `patched_model.py`: figures and reasons for the reader, and the data for `apply_plan`."""
    table = plan_table(plan)
    for path, entry in table["scopes"].items():
        reasons = plan.reasons_of(path)
        if reasons:
            codes = dict.fromkeys(code for reason in reasons for code in reason.rules)
            saved = max(reason.saves or 0.0 for reason in reasons)
            entry["because"] = [*codes, *(reason.words for reason in reasons)]
            entry["cost"] = f"{saved:.1%} of the predicted {plan.objective}"
    keys = ("strategy", "format", "predicted_error", "measured_error", "is_verified", "predicted_speedup")
    figures = {key: _literal(getattr(plan, key)) for key in keys}
    if plan.gpu_only is not None:
        figures["gpu_only"] = plan.gpu_only
    return {**figures, **table}


def _literal(value: Any) -> Any:
    """A number with four significant digits; None for Inf and NaN, which have no Python literal. Other values as they
    are."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _source(origin: Origin | None, directory: Path) -> dict[str, Any] | None:
    if origin is None:
        return None
    folder = {} if origin.folder is None else {"folder": _place(origin.folder, directory)}
    words = {"words": origin.words} if origin.words else {}
    method = {"method": origin.method} if origin.method else {}
    return {
        "path": _place(origin.path, directory),
        "digest": origin.digest,
        "module": origin.module,
        "working_directory": _place(origin.working_directory, directory),
        "symbol": origin.symbol,
        "kind": origin.kind,
        "init_args": tuple(origin.init_args),
        "init_kwargs": dict(origin.init_kwargs),
        "weights": _place(origin.weights, directory),
        **folder,
        **words,
        **method,
    }


def _place(path: str | None, directory: Path) -> str | None:
    """The file's path, relative to the directory."""
    return None if path is None else Path(os.path.relpath(Path(path).resolve(), directory.resolve())).as_posix()


def _text_from(module: ModuleType, start: str) -> str:
    text = inspect.getsource(module)
    return text[text.index(start) :]
