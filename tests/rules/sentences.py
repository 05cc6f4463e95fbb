"""What each field of a message must read, worked out from a run of the model itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from auditor.numerics.formats import label
from auditor.numerics.nodes import overload_named
from auditor.records import Finding
from tests.rules.recorded import LOW, Call, Run, largest, tensors


class Seen:
    """A finding, the call it is about, and the runs around it: as it is, under autocast, and cast."""

    def __init__(self, finding: Finding, call: Call, run: Run, lowered: Mapping[str, Call | None]) -> None:
        self.finding, self.call, self.run, self.lowered = finding, call, run, lowered

    def argument(self, name: str) -> Any:
        """By the name that the operation's schema has for it."""
        schema = overload_named(self.call.op)._schema.arguments
        at = [item.name for item in schema].index(name)
        given = self.call.args[at] if at < len(self.call.args) else self.call.kwargs.get(name)
        return schema[at].default_value if given is None and schema[at].has_default_value() else given


def _literals(seen: Seen) -> list[float]:
    found = [*seen.call.args, *seen.call.kwargs.values()]
    return [float(item) for item in found if isinstance(item, (int, float)) and not isinstance(item, bool)]


def _sizes(seen: Seen) -> tuple[int, int, int]:
    """(m, n, k) of a product, and of a convolution as one."""
    call = seen.call
    if "conv" in call.op:
        weight, out = seen.argument("weight"), call.out
        return out.numel() // out.shape[1], weight.shape[0] // seen.argument("groups"), weight[0].numel()
    if "linear" in call.op:
        weight = seen.argument("weight")
        return call.args[0].numel() // call.args[0].shape[-1], weight.shape[0], weight.shape[1]
    if "einsum" in call.op:
        k = next(x for x in tensors(call.args)).shape[-1]
        return call.out.shape[-2], call.out.shape[-1], k
    a, b = tensors(call.args)[:2]
    return (a.numel() // a.shape[-1] if b.dim() <= 2 else a.shape[-2]), b.shape[-1], a.shape[-1]


def _tiled(seen: Seen) -> list[int]:
    if "conv" in seen.call.op:
        return list(seen.argument("weight").shape[:2])
    return [*_sizes(seen)[1:]]


def _up(width: int) -> int:
    return -(-width // 8) * 8


def _reduced(seen: Seen) -> int:
    call = seen.call
    if "attention" in call.op:
        return int(call.args[1].shape[-2])
    if "loss" in call.op or "cross_entropy" in call.op:
        of_classes = "cross_entropy_loss" in call.op or "nll" in call.op
        return int(tensors(call.args)[1 if of_classes else 0].numel())
    x = call.args[0]
    if call.out.shape == x.shape and x.dim():
        return int(x.shape[call.args[1] if isinstance(call.args[1], int) else call.args[1][0]])
    return int(x.numel() // call.out.numel())


def _spacing(seen: Seen) -> str:
    exponent = math.floor(math.log2(largest(seen.call.out)))
    spec = _spec(seen, "spacing")
    return " and ".join(
        f"{format(torch.finfo(LOW[fmt]).eps * 2.0**exponent, spec)} in {label(fmt)}" for fmt in seen.finding.formats
    )


def _spec(seen: Seen, name: str) -> str:
    found = re.search(rf"{{{name}:([^}}]*)}}", TEMPLATES[seen.finding.rule])
    return found[1] if found else ""


TEMPLATES: dict[str, str] = {}
"""{code: message of the rule}, filled by the test."""


def _additions(seen: Seen) -> list[tuple[Tensor, Tensor]]:
    """(value, update) of each addition back from the last, the larger term being what is added to."""
    made = {id(call.out): call for call in seen.run}
    found, call = [], seen.call
    while call.op == "aten.add.Tensor" and len(tensors(call.args)) == 2:
        update, value = sorted(tensors(call.args), key=largest)
        found.append((value, update))
        before = made.get(id(value))
        while before is not None and len(tensors(before.args)) == 1 and ".mul" in before.op:
            before = made.get(id(before.args[0]))
        if before is None:
            break
        call = before
    return found


def _absorbed(seen: Seen) -> str:
    steps, spec, words = _additions(seen), _spec(seen, "absorbed"), []
    for fmt in seen.finding.formats:
        apart = [torch.finfo(LOW[fmt]).eps * 2.0 ** math.floor(math.log2(largest(value))) for value, _ in steps]
        lost = sum(largest(update) for (_, update), gap in zip(steps, apart, strict=True) if largest(update) <= gap / 2)
        words.append(f"{format(lost / apart[0], spec)} in {label(fmt)}")
    return " and ".join(words)


def _low_where(seen: Seen) -> str:
    """By the dtypes that the operation has in a run under autocast, and in one of the model cast."""
    low = {use: call is not None and call.out.dtype in LOW.values() for use, call in seen.lowered.items()}
    return {
        (True, True): "under autocast and in a cast model",
        (True, False): "under autocast (not in a cast model)",
        (False, True): "in a cast model (not under autocast)",
        (False, False): "unknown",
    }[low["autocast"], low["cast"]]


def _divisor(seen: Seen) -> float:
    of = seen.call.args[1 if ".div." in seen.call.op else 0].abs()
    return float(of[of > 0].min())


def _steps(seen: Seen) -> int:
    call = seen.call
    if "cell" in call.op:
        weight = next(item for item in call.args[2:] if isinstance(item, Tensor))
        return sum(
            weight.data_ptr() in {x.data_ptr() for x in tensors(other.args)} for other in seen.run.calls[call.op]
        )
    return int(call.args[0].shape[1 if call.args[-1] is True else 0])


def _readers(seen: Seen) -> int:
    """Operations that read the table's memory and give memory of their own."""
    table = tensors(seen.call.args)[0].untyped_storage().data_ptr()

    def reads(call: Call) -> bool:
        held = {x.untyped_storage().data_ptr() for x in tensors((call.args, call.kwargs))}
        return table in held and call.out.untyped_storage().data_ptr() != table

    return sum(reads(call) for call in seen.run)


FIELDS: Mapping[str, Callable[[Seen], Any]] = {
    "output_max_abs": lambda seen: largest(seen.call.out),
    "input_max_abs": lambda seen: largest(seen.call.activations),
    "divisor_min_abs": _divisor,
    "operation": lambda seen: seen.call.op.split(".")[1],
    "formats": lambda seen: " and ".join(label(name) for name in seen.finding.formats),
    "gemm_m": lambda seen: _sizes(seen)[0],
    "gemm_n": lambda seen: _sizes(seen)[1],
    "gemm_k": lambda seen: _sizes(seen)[2],
    "misaligned": lambda seen: " and ".join(dict.fromkeys(str(width) for width in _tiled(seen) if width % 8)),
    "gemm_padding": lambda seen: math.prod(_up(width) / width for width in _tiled(seen)) - 1,
    "reduction_length": _reduced,
    "sequence_length": _steps,
    "constant_largest": lambda seen: max(_literals(seen), key=abs),
    "constant_gap_to_one": lambda seen: min(abs(1 - c) for c in _literals(seen) if c != 1),
    "eps": lambda seen: min(
        c for c in [*_literals(seen), *([seen.argument("eps")] if "cosine" in seen.call.op else [])] if c > 0
    ),
    "headroom_bits.fp16": lambda seen: math.log2(65504 / largest(seen.call.out)),
    "cancelled_bits": lambda seen: math.log2(largest(seen.call.activations) / largest(seen.call.out)),
    "buffer_max_abs": lambda seen: max(largest(x) for x in tensors(seen.call.args) if id(x) in seen.call.fixed),
    "weight_uses": _readers,
    "additions": lambda seen: len(_additions(seen)),
    "absorbed": _absorbed,
    "spacing": _spacing,
    "low_where": _low_where,
}
"""{field of a message: what it must be}."""


def reading(seen: Seen) -> str:
    """The message as it must read."""
    text = TEMPLATES[seen.finding.rule]
    for fmt, clause in re.findall(r"\[(\w+): ([^]]*)\]", text):
        text = text.replace(f"[{fmt}: {clause}]", clause if fmt in seen.finding.formats else "")

    def shown(found: re.Match[str]) -> str:
        value = FIELDS[found[1]](seen)
        return value if isinstance(value, str) else format(value, found[2] or "")

    return re.sub(r"{([\w.]+)(?::([^}]*))?}", shown, text)
