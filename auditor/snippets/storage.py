"""Tools that store or gather weights in low precision: FSDP2 with a policy per module, transformers by weight names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..artefact.text import comment
from ..records import Audit, Plan
from ..records.paths import nearest, nearest_above
from .offer import Tool, dtype_text

_CAST_NOTE = (
    "FSDP2 keeps the shards in FP32 and gathers each group of parameters in param_dtype, so a cast plan also trains. Each "
    "call of fully_shard makes one group: every scope of the plan is a group, inner scopes first. reduce_dtype is set "
    "explicitly, since its default differs between versions of torch.",
    "fully_shard does not convert or shard buffers. `lower_buffers` stores them in the plan's dtypes. In low precision, the "
    "running statistics of a BatchNorm in training lose updates: keep such modules in FP32.",
    "`blocks` are paths of further modules to shard separately, such as the layers of a transformer.",
)

_CAST = '''
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# module: (dtype inside, dtype of the output; None: unchanged)
SCOPES = {{
{scopes}}}


def precision_of(path):
    """(dtype inside, dtype of the output) of a module: its entry, or the dtype inside the nearest enclosing entry."""
    if path in SCOPES:
        return SCOPES[path]
    while path and path not in SCOPES:
        path = path.rpartition(".")[0]
    return SCOPES[path][0], None


def lower_buffers(model):
    for path, module in model.named_modules():
        inside, _ = precision_of(path)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.float32:
                module._buffers[key] = buffer.to(inside)


def shard(model, blocks=(), **options):
    """options: arguments of fully_shard, such as mesh."""
    lower_buffers(model)
    for path in sorted({{*SCOPES, *blocks}}, key=lambda path: (-path.count(".") - bool(path), path)):
        inside, outside = precision_of(path)
        policy = MixedPrecisionPolicy(
            param_dtype=inside, reduce_dtype=torch.float32, output_dtype=outside
        )
        fully_shard(model.get_submodule(path), mp_policy=policy, **options)
    return model
'''

_AUTOCAST_NOTE = (
    "An autocast plan needs its weights in FP32, since torch.autocast inside the patched model casts them: the policy must "
    "cast nothing. Parameters are therefore gathered in FP32, which doubles the traffic. A plan of strategy cast, if the "
    "audit has one, gathers them in low precision (--plan cast_{format}).",
    "patched_model.py is in the directory of plan.json. `blocks` are paths of further modules to shard separately.",
)

_AUTOCAST = '''
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import patched_model

POLICY = MixedPrecisionPolicy(
    param_dtype=None, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
)


def shard(model, blocks=(), **options):
    """options: arguments of fully_shard, such as mesh."""
    patched_model.apply(model, plan={name!r})
    for path in sorted(blocks, key=lambda path: (-path.count("."), path)):
        fully_shard(model.get_submodule(path), mp_policy=POLICY, **options)
    return fully_shard(model, mp_policy=POLICY, **options)
'''


def _sharding_code(audit: Audit, plan: Plan) -> str:
    """Code that defines `shard(model)` with FSDP2; a shared module has one entry."""
    if plan.strategy == "autocast":
        notes = (note.replace("{format}", plan.format) for note in _AUTOCAST_NOTE)
        return comment(*notes) + _AUTOCAST.format(name=plan.name)
    names, entries = _names(audit, plan), []
    for path in sorted(plan.scopes, key=lambda path: (-path.count(".") - bool(path), path)):
        choice, above = plan.scopes[path], nearest_above(path, plan.scopes)
        outside = dtype_text(plan.scopes[above].precision) if above is not None and choice.output != "keep" else None
        if names.get(path, path) == path:
            entries.append(f"    {path!r}: ({dtype_text(choice.precision)}, {outside}),\n")
    return comment(*_CAST_NOTE) + _CAST.format(scopes="".join(entries))


def _names(audit: Audit, plan: Plan) -> dict[str, str]:
    """{path of a shared module: the path that replaces all its paths, if possible a path with a precision}."""
    firsts = [next((path for path in paths if path in plan.scopes), paths[0]) for paths in audit.shared_modules]
    return {path: first for first, paths in zip(firsts, audit.shared_modules, strict=True) for path in paths}


def _unshardable(audit: Audit, plan: Plan) -> str | None:
    """Why FSDP2 cannot follow the plan: two of its groups cannot share a parameter, and policies apply to modules."""
    if plan.strategy == "autocast":
        return None
    if kept := "; ".join(f"{name} in {path or 'the root'}" for path, name in plan.exceptions):
        return f"The plan keeps single functions of low-precision modules, or their outputs, in FP32, and FSDP2 policies apply to whole modules: {kept}. Use patched_model.py."
    names = _names(audit, plan)
    for group in audit.tied_parameters:
        owners = [name.rpartition(".")[0] for name in group]
        scopes = sorted({nearest(names.get(path, path), plan.scopes) or "" for path in owners})
        if len(scopes) > 1:
            return (
                f"{' and '.join(map(repr, group))} are one weight, and the plan puts them into different scopes: "
                f"{', '.join(map(repr, scopes))}. FSDP2 would shard this weight twice, as two weights. Use an autocast plan."
            )
    return None


_KEPT_NOTE = (
    "For transformers 5 or newer. Each entry is a regular expression: weights with a matching "
    "name are stored in FP32, for dtype FP16 and BF16 alike. The entries only affect storage, and "
    "most layers fail with FP16 or BF16 inputs and FP32 weights. patched_model.py, in the "
    "directory of plan.json, converts the inputs. patched_model.py also rejects the "
    "model if one of these weights was loaded in low precision.",
    "model_class must be the audited class, not an Auto class: the names are those of its weights.",
)

_LOAD = '''
import torch

import patched_model

KEEP_IN_FP32 = [
{patterns}]


def load(model_class, checkpoint, **options):
    """Load the checkpoint in low precision, except for KEEP_IN_FP32, and apply the plan."""
    before = model_class._keep_in_fp32_modules_strict
    model_class._keep_in_fp32_modules_strict = [*(before or ()), *KEEP_IN_FP32]
    try:
        model = model_class.from_pretrained(checkpoint, dtype={dtype}, **options)
    finally:
        model_class._keep_in_fp32_modules_strict = before
    return patched_model.apply(model, plan={name!r})
'''


def _loading_code(audit: Audit, plan: Plan) -> str:
    """Code with patterns for the weights kept in FP32, and a function that loads a checkpoint with these patterns."""
    listed = "".join(f"    {pattern!r},\n" for pattern in patterns(audit, plan))
    return comment(*_KEPT_NOTE) + _LOAD.format(patterns=listed, dtype=dtype_text(plan.format), name=plan.name)


def patterns(audit: Audit, plan: Plan) -> Iterator[str]:
    """Regular expressions for the state-dict names of exactly the FP32 weights of the plan."""
    scopes = plan.scopes
    for path in (path for path in scopes if scopes[path].precision == "fp32"):
        start = f"{path}." if path else ""
        low = [other for other in scopes if other.startswith(start) and scopes[other].precision != "fp32"]
        outermost = [low_one for low_one in low if not any(low_one.startswith(f"{other}.") for other in low)]
        but_for = "|".join(_literal(other[len(start) :]) for other in outermost)
        yield f"^{_literal(start)}" + (rf"(?!(?:{but_for})\.)" if but_for else "")
    for group in audit.tied_parameters:
        kept = [scopes[nearest(name.rpartition(".")[0], scopes) or ""].precision == "fp32" for name in group]
        if any(kept):  # a shared weight is stored once: FP32 wins
            yield from (f"^{_literal(name)}$" for name, is_kept in zip(group, kept, strict=True) if not is_kept)


def _literal(name: str) -> str:
    """A name as a pattern. transformers turns every `*`, even an escaped one, into `.*`: here `.` replaces it."""
    return re.escape(name).replace(r"\*", ".")


FSDP2 = Tool("FSDP2", ("autocast", "cast"), "", _sharding_code, _unshardable)
HUGGING_FACE = Tool(
    "Hugging Face transformers",
    ("cast",),
    "For an autocast plan, load the checkpoint in FP32 and patch the model: model = patched_model.apply(model). A "
    "Trainer with fp16=True or bf16=True runs the patched model like any other model.",
    _loading_code,
)
