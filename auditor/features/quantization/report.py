"""Layers under quantization schemes, and plans of these schemes: lines for a terminal, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ...artefact.libraries import LIBRARIES, code_of, layers_without_code, quantized_plan
from ...numerics.formats import label
from ...numerics.schemes import SCHEMES
from ...plan.search import MARGIN
from ...records.audit import Audit
from ...records.quantization import KEEP, SMOOTH, QuantizedLayer, QuantizedPlan
from ...report.blocks import Block, Code, Fold, Grid, Prose
from ...report.plans import plans_shown, quantized_title
from ...report.words import count, in_bytes, list_paths, op, or_blank, percent, ratio, scope
from ..page import Page

COLUMNS: Mapping[str, Callable[[QuantizedLayer, Audit], str]] = {
    "Layer": lambda layer, _: f"{scope(layer.owner)} ({op(layer.op)})",
    "Verdict": lambda layer, _: layer.verdict.verdict,
    "Cause": lambda layer, _: _cause(layer),
    "Remedy": lambda layer, audit: _remedy(layer, audit),
    "Rules": lambda layer, audit: _rules(layer, audit),
    "Effect": lambda layer, _: ratio(layer.effect),
    "Error": lambda layer, _: ratio(layer.error),
    "Weight": lambda layer, _: ratio(layer.weight_error),
    "Input": lambda layer, _: ratio(layer.activation_error),
    "Saturated": lambda layer, _: f"{layer.saturated:,}",
    "To zero": lambda layer, _: f"{layer.zeroed:,}",
    "Zero blocks": lambda layer, _: layer.zero_blocks.replace("activation", "input"),
}
TEXTS = 5
"""Number of columns of text, which are left-aligned and may wrap."""
ABOUT = "Each layer was quantized alone, with everything else in FP32. Effect: {}. Error: relative L2 error of the layer's result. Weight: this error with only the weight quantized. Input: the further error from quantizing the input. Saturated: number of entries beyond the scheme's largest number. To zero: number of non-zero entries that become zero. Zero blocks: the part with a row or block of zeros, which is NaN in torchao unless its scale has a lower bound. Rules: rules that report the layer; a rule is confirmed if the layer's verdict is sensitive or unsafe."

PLAN_COLUMNS: Mapping[str, Callable[[QuantizedPlan], str]] = {
    "Plan": lambda plan: quantized_title(plan),
    "Run by": lambda plan: plan.verified_by,
    "Bits": lambda plan: f"{plan.model_bits:.3f}",
    "Of layers": lambda plan: f"{plan.effective_bits:.3f}",
    "Weights": lambda plan: in_bytes(plan.weights_bytes),
    "Share": lambda plan: percent(plan.weights_share),
    "Time": lambda plan: or_blank(plan.time_share, percent),
    "Error": lambda plan: ratio(plan.calibration_error),
    "Held-out": lambda plan: or_blank(plan.held_out_error, ratio),
    "Predicted": lambda plan: ratio(plan.predicted_error),
    "Sum of single": lambda plan: ratio(plan.single_errors),
    "Runs": lambda plan: f"{plan.runs:,}",
}
PLANS = (
    "Each plan uses the fewest bits per weight that the search found within 80 % of the error budget, since other inputs may have larger errors. Bits: mean bits per weight over the whole model, scales of blocks included. "
    "Of layers: the same over all layers that a scheme can quantize. Weights: memory of all weights, with 16 bits where not quantized. Share, Time: this memory, and the predicted time, "
    "relative to the model in 16 bits. Error: error on the calibration inputs, with all other layers in FP32. Held-out: the same on the held-out inputs. Predicted: "
    "error predicted from the output changes of each group of layers alone. Sum of single: sum of the layers' single effects. Runs: number of model runs in the search."
)
LAYERS_SHOWN = 3


def quantization_lines(audit: Audit) -> list[str]:
    """Lines for a terminal: each plan, the best one first; for each scheme, the number of safe layers; the worst layer,
    its cause and remedy."""
    lines = [_plan_line(plan, audit) for plan in plans_shown(audit)]
    lines += filter(None, [_without_code(audit), _not_shown(audit)])
    for scheme, every in _by_scheme(audit).items():
        layers = [layer for layer in every if layer.has_kernel]
        safe, worst = sum(layer.verdict.verdict == "safe" for layer in layers), layers[0]
        rules = f"Rules: {_rules(worst, audit)}." if _rules(worst, audit) and _worst(worst, audit) else ""
        without = len(every) - len(layers)
        others = f"; no kernel fits {without:,} other{'s' * (without > 1)}" * bool(without)
        first = f"{label(scheme)}: {safe} of {count(len(layers), 'layer')} can be quantized safely{others}."
        lines.append(" ".join(filter(None, (first, _worst(worst, audit), rules, _zero_blocks(layers)))))
    return lines


def _zero_blocks(layers: Sequence[QuantizedLayer]) -> str:
    """A sentence on layers with a row or block of zeros, which libraries treat differently."""
    inputs = [layer for layer in layers if layer.zero_blocks == "activation"]
    weights = [layer for layer in layers if layer.zero_blocks in ("weight", "both")]
    sentences = []
    if inputs:
        sentences.append(
            f"the inputs of {count(len(inputs), 'layer')}, such as padding, for which the code sets a lower bound of the scale"
        )
    if weights:
        sentences.append(
            f"the weights of {list_paths([layer.owner for layer in weights], LAYERS_SHOWN, 'layer')}, which the code leaves in 16 bits"
        )
    return f"torchao turns rows of zeros into NaN: {'; '.join(sentences)}." if sentences else ""


def _not_shown(audit: Audit) -> str:
    """A sentence on the plans that another plan dominates."""
    plans = {plan.name: plan for plan in audit.quantized_plans}
    dominated = [(plan, plans[plan.dominated_by]) for plan in plans.values() if plan.dominated_by]
    listed = [f"{quantized_title(plan)} (see the {quantized_title(better)})" for plan, better in dominated]
    less = "another plan needs no more bits, memory and time, and has a smaller error or the same layers"
    return f"Not listed, since {less}: {', '.join(listed)}." if listed else ""


def _plan_line(plan: QuantizedPlan, audit: Audit) -> str:
    """A line with a plan's bits, memory, time and errors, and the layers that stay in 16 bits."""
    kept = _layers_of(plan, "")
    budget = "limits of all criteria" if audit.criteria else f"error budget of {ratio(audit.max_error)}"
    if len(kept) == len(plan.layers):
        why = f"none of the {count(plan.tested, 'tested choice')} of layers is within {MARGIN:.0%} of the {budget}"
        if not plan.tested:
            why = "no run with a quantized layer gave finite outputs"
        return f"{quantized_title(plan)}: no layer is quantized, since {why}."
    faster = f", and {percent(plan.time_share)} of the predicted time" if plan.time_share is not None else ""
    them = "these layers" if not kept else "all layers that can be quantized"
    left = f" Still in 16 bits: {list_paths(kept, LAYERS_SHOWN, 'layer')}." if kept else ""
    unsafe = [layer for layer, why in plan.despite.items() if why.startswith("unsafe")]
    despite = f" Unsafe alone, yet within the limit in this plan: {list_paths(unsafe, LAYERS_SHOWN, 'layer')}." * bool(
        unsafe
    )
    score = f" The score is {or_blank(plan.score.value)}." if plan.score is not None and not plan.score.failure else ""
    of_layers = f", and {plan.effective_bits:.2f} over {them}" if plan.effective_bits != plan.model_bits else ""
    return (
        f"{quantized_title(plan)}: {len(plan.layers) - len(kept)} of {count(len(plan.layers), 'layer')} quantized, with {plan.model_bits:.2f} bits per weight "
        f"on average over the whole model{of_layers}. Compared with 16 bits, the model needs {percent(plan.weights_share)} of the weight memory{faster}. The error is {ratio(plan.error)}, within the {budget}.{score}{despite}{left}{_left_out(plan)}"
    )


def _without_code(audit: Audit) -> str:
    """A sentence on layers that plans quantize and no library's code does, such as experts in one parameter."""
    paths = dict.fromkeys(path for plan in plans_shown(audit) for path in layers_without_code(audit, plan))
    if not paths:
        return ""
    return f"In 16 bits in the code for every library: {list_paths([*paths], LAYERS_SHOWN, 'layer')}."


def _left_out(plan: QuantizedPlan) -> str:
    """A sentence on weights of products that no scheme can quantize, such as experts in one parameter."""
    listed = list_paths(plan.left_out, LAYERS_SHOWN, "weight")
    return f" In 16 bits, since no audited scheme can quantize them: {listed}." if listed else ""


def _layers_of(plan: QuantizedPlan, scheme: str) -> list[str]:
    return [layer for layer, one in plan.layers.items() if one == scheme]


def _plan_tables(audit: Audit) -> list[Block]:
    """The plans, and the layers of each plan by scheme."""
    shown = plans_shown(audit)
    rows = tuple(tuple(cell(plan) for cell in PLAN_COLUMNS.values()) for plan in shown)
    layers = [
        (
            quantized_title(plan),
            label(scheme) if scheme else "16 bits",
            f"{len(of_scheme):,}",
            list_paths(of_scheme, len(of_scheme)),
        )
        for plan in shown
        for scheme in (*plan.schemes, "")
        if (of_scheme := _layers_of(plan, scheme))
    ]
    layers += [
        (quantized_title(plan), "16 bits, no scheme fits", f"{len(plan.left_out):,}", ", ".join(plan.left_out))
        for plan in shown
        if plan.left_out
    ]
    return [
        Prose("", tuple(filter(None, (PLANS, _not_shown(audit)))), "about"),
        Grid(tuple(PLAN_COLUMNS), rows, texts=2, caption="Plans"),
        Grid(("Plan", "Scheme", "Number", "Layers"), tuple(layers), texts=4, caption="Layers of the plans"),
    ]


def _codes(audit: Audit) -> Iterator[Block]:
    """The best plan as code for each library."""
    if audit.quantized_plans:
        plan = quantized_plan(audit)
        for library in LIBRARIES.values():
            code = Code("", code_of(audit, library, plan))
            yield Fold(f"The {quantized_title(plan)} in {library.title}: quantized/{plan.name}/{library.file}", (code,))


def _worst(layer: QuantizedLayer, audit: Audit) -> str:
    """Sentences on a layer's verdict, effect, cause and remedy; empty for a safe layer."""
    if layer.verdict.verdict == "safe":
        return ""
    remedy = f" Remedy: {_remedy(layer, audit)}." if layer.remedy else ""
    effect = f"{ratio(layer.effect)}{' times a limit' * bool(audit.criteria)}"
    return f"The worst, `{scope(layer.owner)}` ({op(layer.op)}), is {layer.verdict.verdict}, with an effect of {effect} on the outputs. The cause is {_cause(layer)}.{remedy}"


def quantization_section(audit: Audit) -> list[Block]:
    """The report's section on quantization: a table of all layers for each scheme; empty without schemes."""
    tables = [
        Grid(
            tuple(COLUMNS),
            tuple(tuple(cell(layer, audit) for cell in COLUMNS.values()) for layer in layers),
            texts=TEXTS,
            caption=f"{label(scheme)}, torchao: {SCHEMES[scheme].source}",
        )
        for scheme, layers in _by_scheme(audit).items()
    ]
    effect = "largest used share of a criterion's limit" if audit.criteria else "change of the outputs"
    about = Prose("", (ABOUT.format(effect),), "about")
    return [*_plan_tables(audit), *_codes(audit), about, *tables] if tables else []


def _rules(layer: QuantizedLayer, audit: Audit) -> str:
    """Codes of the rules that are about the layer under its scheme, and whether the measurement confirms them."""
    is_confirmed = layer.verdict.verdict in ("unsafe", "sensitive")
    word = "confirmed" if is_confirmed else "not confirmed"
    texts = list[str]()
    for finding in audit.findings:
        is_of_operation = (finding.owner, finding.op) == (layer.owner, layer.op)
        is_of_call = finding.node in ("", layer.node)  # "": read from plan.json
        if layer.scheme in finding.formats and is_of_operation and is_of_call:
            texts.append(f"{finding.rule} {word}")
    return ", ".join(texts)


def _by_scheme(audit: Audit) -> dict[str, list[QuantizedLayer]]:
    """{scheme: all layers, the worst first}. Of a layer's calls, the one whose result has the largest error."""
    worst = dict[tuple[str, str, str], QuantizedLayer]()
    for call in audit.quantization:
        layer = call.scheme, call.owner, call.key
        if layer not in worst or call.error > worst[layer].error:
            worst[layer] = call
    result = dict[str, list[QuantizedLayer]]()
    for call in worst.values():
        result.setdefault(call.scheme, []).append(call)
    return result


def _cause(layer: QuantizedLayer) -> str:
    parts = {"activation": "the input", "both": "weight and input"}
    return f"{layer.cause} of {parts.get(layer.part, 'the weight')}{f' ({layer.place})' if layer.place else ''}"


def _smoothing(layer: QuantizedLayer) -> str:
    """What smoothing would gain, if it was measured and is not enough."""
    if layer.smoothed is None:
        return ""
    return f"; a smoothed input ({layer.smoothing}) has an effect of {ratio(layer.smoothed)}"


def _remedy(layer: QuantizedLayer, audit: Audit) -> str:
    """The remedy in words, and the plan that does without it, if a plan quantizes the layer under this scheme."""
    if not layer.has_kernel:
        return "stays in 16 bits, since no kernel fits"
    if not layer.remedy:
        return ""
    advice = f"quantize it as {label(layer.remedy)} (effect {ratio(layer.remedied)})"
    if layer.remedy == KEEP:
        advice = f"do not quantize this layer{_smoothing(layer)}"
    if layer.remedy == SMOOTH:
        bits = SCHEMES[layer.scheme].weight.bits
        advice = f"smooth its input ({layer.smoothing}; effect {ratio(layer.remedied)} instead of {ratio(layer.effect)}), which saves {16 - bits:g} bits per weight"
    plans = (plan for plan in audit.quantized_plans if plan.layers.get(layer.key) == layer.scheme)
    if (plan := next(plans, None)) is not None:
        return f"not needed in the {quantized_title(plan)}, which is within the limit; in other plans, {advice}"
    return advice


def _always_shown(audit: Audit) -> int:
    """How many of the first lines a terminal never omits: one for each plan."""
    return max(len(audit.quantized_plans), 1)


PAGE = Page(
    "Quantization",
    "Quantization below 16 bits",
    lambda audit: quantization_lines(audit)[:1],
    quantization_section,
    label="Quantized",
    lines=quantization_lines,
    always_shown=_always_shown,
)
