"""transformers: modules that from_pretrained keeps in FP32."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .offer import Chosen, Tool, comment, dtype_text, listing

_NOTE = (
    "transformers 5 or newer. Each entry is searched, as a regular expression, in the names of the checkpoint; what it "
    "finds is stored in FP32, for dtype FP16 and BF16 alike. This is about storage only: nothing raises what enters an "
    "FP32 module, and most layers refuse FP16 or BF16 inputs beside FP32 weights. patched_model.py, which the audit "
    "wrote beside plan.json, does that; it also refuses the model if a weight was missed.",
    "model_class is the class that was audited, not an Auto class: names start at it.",
)

_LOAD = '''

def load(model_class, checkpoint, **options):
    """The checkpoint in low precision, but for KEEP_IN_FP32, under the plan."""
    before = model_class._keep_in_fp32_modules_strict
    model_class._keep_in_fp32_modules_strict = [*(before or ()), *KEEP_IN_FP32]
    try:
        model = model_class.from_pretrained(checkpoint, dtype={dtype}, **options)
    finally:
        model_class._keep_in_fp32_modules_strict = before
    return patched_model.apply(model, plan={name!r})
'''


def render(chosen: Chosen) -> str:
    """Patterns for the FP32 islands, and a function that loads by them."""
    return "".join(
        (
            comment(*_NOTE),
            "\nimport torch\n\nimport patched_model\n\n",
            listing("KEEP_IN_FP32", map(repr, patterns(chosen))),
            _LOAD.format(dtype=dtype_text(chosen.plan.format), name=chosen.plan.name),
        )
    )


def patterns(chosen: Chosen) -> Iterator[str]:
    """Regular expressions that match the state-dict names of exactly the weights that the plan stores in FP32."""
    for path, choice in chosen.plan.scopes.items():
        if choice.precision == "fp32":
            yield _inside(path) + _but_for(_low_inside(chosen, path))
    for group in chosen.audit.tied_parameters:
        precisions = [chosen.precision(name.rpartition(".")[0]) for name in group]
        if "fp32" in precisions:  # one weight, stored once: FP32 wins
            low = (name for name, precision in zip(group, precisions, strict=True) if precision != "fp32")
            yield from (f"^{_literal(name)}$" for name in low)


def _inside(path: str) -> str:
    return rf"^{_literal(path)}\." if path else "^"


def _low_inside(chosen: Chosen, path: str) -> list[str]:
    """The outermost low scopes in a scope, by their names in it; FP32 ones in them have patterns of their own."""
    start = f"{path}." if path else ""
    low = [other for other, choice in chosen.plan.scopes.items() if choice.precision != "fp32"]
    inside = [other for other in low if other != path and other.startswith(start)]
    outermost = [one for one in inside if not any(one.startswith(f"{other}.") for other in inside)]
    return [other[len(start) :] for other in outermost]


def _but_for(names: list[str]) -> str:
    return rf"(?!(?:{'|'.join(map(_literal, names))})\.)" if names else ""


def _literal(name: str) -> str:
    """A name as a pattern. transformers reads `*` as `.*`, escaped or not: any one character stands for it here."""
    return re.escape(name).replace(r"\*", ".")


TOOL = Tool(
    title="Hugging Face transformers",
    strategies=("cast",),
    otherwise="Under autocast the checkpoint is loaded in FP32 as it is, and then patched: "
    "model = patched_model.apply(model). A Trainer with fp16=True or bf16=True runs it as it would any model.",
    render=render,
)
