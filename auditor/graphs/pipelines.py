"""Runs pipelines with quantization schemes of their own: dynamic INT8, PT2E INT8, Adam with an 8-bit state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from ..errors import describe, let_through
from ..isolation import isolate
from ..isolation.answer import answer
from ..isolation.process import quietly
from ..plan.workbench import Workbench, worst_of
from ..records.quantization import PipelineRun
from ..stages import Stages
from .exported import export_model

STEPS = 8
"""Steps of Adam, all with the first batch's gradient."""

Result = tuple[float | None, str, Mapping[str, float]]
"""The fields `error`, `said` and `parts` of a PipelineRun."""


def run_pipelines(
    bench: Workbench, gradients: Mapping[str, torch.Tensor] | None, stages: Stages
) -> Iterator[PipelineRun]:
    """Run the pipelines that belong to the audited INT8 schemes. gradients: by parameter, of an FP32 training step."""
    schemes, runs = {*bench.options.schemes}, dict[str, Callable[[], Result]]()
    if schemes & {"int8", "int8_asymmetric"}:
        runs["quantize_dynamic"] = partial(_outputs, bench, _dynamic)
    if "int8_static" in schemes:
        runs["PT2E INT8"] = partial(_outputs, bench, _pt2e)
    if gradients and any(scheme.startswith("int8") for scheme in schemes):
        runs["Adam8bit"] = partial(_adam, gradients)
    for name, run in runs.items():
        with stages("pipelines", name):
            try:
                with quietly():
                    result = run()
            except Exception as error:
                let_through(error)
                why = "not installed" if isinstance(error, ImportError) else "failed"
                result = None, f"{why}: {describe(error)}", {}
            yield PipelineRun(name, *result)


def _outputs(bench: Workbench, make: Callable[[Workbench], tuple[nn.Module, str]]) -> Result:
    """Run a pipeline for CPUs; return the output error of its model on the worst calibration batch."""
    if bench.options.native:
        return None, "not run: its kernels are for CPUs, and the audit ran on a GPU", {}
    seed, distance, batches = bench.options.seed, bench.yardstick.distance, bench.subject.batches
    with isolate(bench.subject.model, seed=seed):
        model, said = make(bench)
        errors = [distance(bench.reference(batch), answer(model, batch, seed=seed)) for batch in batches]
    return worst_of(errors), said, {}


def _dynamic(bench: Workbench) -> tuple[nn.Module, str]:
    """Run PyTorch's dynamic INT8 quantization of linear layers and RNNs."""
    from torch.ao.quantization import quantize_dynamic
    from torch.ao.quantization.quantization_mappings import get_default_dynamic_quant_module_mappings

    model = quantize_dynamic(bench.subject.model)  # type: ignore[no-untyped-call]
    made = tuple(get_default_dynamic_quant_module_mappings().values())
    quantized = sum(isinstance(module, made) for module in model.modules())
    modules = "1 module" if quantized == 1 else f"{quantized:,} modules"
    return model, f"{modules} in INT8, with the quantized engine {torch.backends.quantized.engine}"


def _pt2e(bench: Workbench) -> tuple[nn.Module, str]:
    """Run torchao's static INT8 quantization of an exported graph, calibrated on the calibration inputs."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    batches = bench.subject.batches
    graph = export_model(bench.subject.model, batches[0]).graph_module
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(graph, quantizer)
    with torch.no_grad():
        for args, kwargs in batches:
            prepared(*args, **kwargs)
    converted = convert_pt2e(prepared)
    weights = sum("dequantize_per_channel" in str(node.target) for node in converted.graph.nodes)
    return converted, f"{weights} weights in INT8 by X86InductorQuantizer"


def _adam(gradients: Mapping[str, torch.Tensor]) -> Result:
    """Relative error of the weights' change caused by the 8-bit state of torchao's Adam, in total and by module."""
    from torchao.optim import Adam8bit

    squares: dict[str, list[float]] = {}
    low = 0
    for name, gradient in gradients.items():
        changes = list[torch.Tensor]()
        for kind in (Adam8bit, torch.optim.Adam):
            weight = nn.Parameter(torch.zeros_like(gradient))
            weight.grad, optimizer = gradient, kind([weight], lr=1.0)
            with torch.compiler.set_stance("force_eager"):
                for _ in range(STEPS):
                    optimizer.step()
            low += type(optimizer.state[weight]["exp_avg"]) is not torch.Tensor
            changes.append(weight.detach())
        own = squares.setdefault(name.rpartition(".")[0], [0.0, 0.0])
        own[0] += float((changes[0] - changes[1]).square().sum())
        own[1] += float(changes[1].square().sum())
    parts = {module: (error / whole) ** 0.5 if whole else 0.0 for module, (error, whole) in squares.items()}
    error, whole = (sum(each) for each in zip(*squares.values(), strict=True))
    said = f"{low} of {len(gradients)} parameters have an 8-bit state; error of the weights' change in {STEPS} steps"
    return (error / whole) ** 0.5 if whole else 0.0, said, parts
