"""FSDP2: one MixedPrecisionPolicy for every scope of a cast plan; none that casts for an autocast plan."""

from __future__ import annotations

from .offer import Chosen, Tool, comment, dtype_text, mapping

_CAST_NOTE = (
    "FSDP2 keeps the shards in FP32 and gathers each group of parameters in param_dtype, so a cast plan also trains. A "
    "group is what one call of fully_shard takes: every scope of the plan is one, inner ones first. reduce_dtype is "
    "stated since its default differs between versions of torch.",
    "fully_shard leaves buffers alone. `lower_buffers` stores them as the plan does; the running statistics of a "
    "BatchNorm that trains lose their updates that way: keep such modules in FP32.",
    "`blocks` are paths of modules to shard on their own besides, such as the layers of a transformer.",
)

_CAST = '''

def precision_of(path):
    """(dtype inside, dtype handed on) of a module: its own entry, or inside that of the nearest one above."""
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
    """options: of fully_shard, such as mesh."""
    lower_buffers(model)
    for path in sorted({*SCOPES, *blocks}, key=lambda path: (-path.count(".") - bool(path), path)):
        inside, outside = precision_of(path)
        policy = MixedPrecisionPolicy(
            param_dtype=inside, reduce_dtype=torch.float32, output_dtype=outside
        )
        fully_shard(model.get_submodule(path), mp_policy=policy, **options)
    return model
'''

_AUTOCAST_NOTE = (
    "An autocast plan needs its weights in FP32, and torch.autocast, inside the patched model, casts: the policy must "
    "cast nothing. Parameters are therefore gathered in FP32, which is twice the traffic; a plan of strategy cast, if the "
    "audit has one, gathers them low (--plan cast_{format}).",
    "patched_model.py lies beside plan.json. `blocks` are paths of modules to shard on their own besides the model.",
)

_AUTOCAST = '''
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import patched_model

POLICY = MixedPrecisionPolicy(
    param_dtype=None, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
)


def shard(model, blocks=(), **options):
    """options: of fully_shard, such as mesh."""
    patched_model.apply(model, plan={name!r})
    for path in sorted(blocks, key=lambda path: (-path.count("."), path)):
        fully_shard(model.get_submodule(path), mp_policy=POLICY, **options)
    return fully_shard(model, mp_policy=POLICY, **options)
'''


def render(chosen: Chosen) -> str:
    """A function `shard(model)`."""
    if chosen.plan.strategy == "autocast":
        notes = (note.replace("{format}", chosen.plan.format) for note in _AUTOCAST_NOTE)
        return comment(*notes) + _AUTOCAST.format(name=chosen.plan.name)
    names = _names(chosen)
    entries = {path: _dtypes(chosen, path) for path in chosen.deepest_first() if names.get(path, path) == path}
    imports = "\nimport torch\nfrom torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n\n"
    explained = "# module: (dtype inside, dtype in which it hands on its output; None leaves it)\n"
    return comment(*_CAST_NOTE) + imports + explained + mapping("SCOPES", entries) + _CAST


def _dtypes(chosen: Chosen, path: str) -> str:
    outside = chosen.handed_on(path)
    return f"({dtype_text(chosen.plan.scopes[path].precision)}, {dtype_text(outside) if outside else None})"


def _names(chosen: Chosen) -> dict[str, str]:
    """{path of a shared module: the one of its paths that stands for it, a scope if any is}."""
    found = {}
    for paths in chosen.audit.shared_modules:
        first = next((path for path in paths if path in chosen.plan.scopes), paths[0])
        found.update(dict.fromkeys(paths, first))
    return found


def impossible(chosen: Chosen) -> str | None:
    """Two groups of FSDP2 cannot share a parameter, and its policies are those of modules."""
    if chosen.plan.strategy == "autocast" or chosen.exceptions:
        return chosen.exceptions if chosen.plan.strategy != "autocast" else None
    names = _names(chosen)
    for group in chosen.audit.tied_parameters:
        owners = {name: name.rpartition(".")[0] for name in group}
        scopes = sorted({chosen.scope_of(names.get(path, path)) for path in owners.values()})
        if len(scopes) > 1:
            return (
                f"{' and '.join(map(repr, group))} are one weight, and the plan puts them into different scopes: "
                f"{', '.join(map(repr, scopes))}. FSDP2 would shard it twice and untie it. Use an autocast plan."
            )
    return None


TOOL = Tool(
    title="FSDP2",
    strategies=("autocast", "cast"),
    otherwise="",
    render=render,
    impossible=impossible,
)
