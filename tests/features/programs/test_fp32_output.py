"""Products of low inputs with FP32 output in programs: planned, priced, traced for a CPU and a GPU, and in ONNX models."""

import io
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import auditor
from auditor.features.programs.exported import export_model
from auditor.features.programs.graphs import _multiply, lower_operations
from auditor.features.programs.onnxfile import TRANSLATIONS, as_bytes, with_onnx
from auditor.features.programs.onnxgraph import tidy
from auditor.features.programs.operations import table_of
from auditor.plan.recommend import kept_apart
from auditor.records import Audit
from auditor.records.paths import FP32_OUTPUT
from tests.support.capturing import Function
from tests.support.planning import planning_of
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded

X = normal(16, 64)


def overflowing() -> nn.Module:
    """Products of about 3e5 are beyond FP16's 65504; the inputs are not."""
    model = Model(lambda m, x: F.log_softmax(m.head(x) / 1e5, -1), head=nn.Linear(64, 32))
    model.head.weight.data *= 3e5
    return model


@pytest.fixture(scope="module")
def found() -> Audit:
    return with_onnx(auditor.audit(seeded(overflowing), X, formats="fp16", strategies="graph"))


def test_a_product_that_only_overflows_in_its_output_reads_fp16(found: Audit) -> None:
    plan = found.plans["graph_fp16"]
    assert plan.is_verified
    assert plan.predicted_error == pytest.approx(plan.measured_error, rel=0.2)
    (output,) = [kept for kept in plan.program.kept if kept.only_output]
    assert (output.name, output.node, output.kind) == (f"linear{FP32_OUTPUT}", "linear", "unsafe")
    assert plan.low_precision_flops == 1.0
    assert kept_apart(plan) == "1 operation and the output of 1 matrix product"
    (row,) = [row for row in found.ledger if row.op == "aten.linear.default"]
    assert row.planned == "float16"


def test_the_program_multiplies_rounded_inputs_in_fp32_on_a_cpu(found: Audit) -> None:
    program = torch.export.load(io.BytesIO(found.programs["graph_fp16.pt2"])).module()
    head = seeded(overflowing).head
    rounded = F.linear(*(x.half().float() for x in (X, head.weight.detach(), head.bias.detach())))
    with torch.no_grad():
        assert torch.equal(program(X), F.log_softmax((rounded / 1e5).half(), -1).float())
    assert {x.dtype for x in program.parameters()} == {torch.float16}


def test_the_onnx_model_has_the_error_of_the_program(found: Audit) -> None:
    told = found.plans["graph_fp16"].program.onnx
    assert told.failure is None
    assert told.rounded_error == pytest.approx(told.program_error, rel=0.1)
    model = onnx.load_from_string(found.programs["graph_fp16.onnx"])
    types = {each.name: each.type.tensor_type.elem_type for each in model.graph.value_info}
    (product,) = [node for node in model.graph.node if node.op_type == "Gemm"]
    assert types[product.output[0]] == onnx.TensorProto.FLOAT


def test_it_costs_more_than_a_low_output_and_less_than_fp32_inputs() -> None:
    """[64, 256] @ [256, 512]: 64 x 512 numbers of two more bytes are written."""
    model = seeded(lambda: Model(lambda m, x: m.layer(x).relu(), layer=nn.Linear(256, 512, bias=False)))
    planning = planning_of(model, normal(64, 256), formats=("bf16",))
    table = table_of(export_model(model, planning.subject.batches[0]).graph_module.graph, "bf16", planning)
    ((name, output),) = [
        (name, *table.whole(name) - {name}) for name in table.operations if len(table.whole(name)) == 2
    ]
    some = table.whole(name)
    prices = [table.price(low, some)[0] for low in (some, frozenset((name,)), frozenset[str]())]
    assert prices == sorted(prices)
    assert table.operations[output].high == pytest.approx(2 * 64 * 512 / 2039e9)
    squares = [table.price(low, some)[1] for low in (some, frozenset((name,)))]
    assert squares[0] - squares[1] == pytest.approx(table.operations[output].error)
    assert table.operations[output].error > 0


LINEAR: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "linear": (torch.ops.aten.linear.default, ((4, 3, 8), (5, 8), (5,))),
    "matmul": (torch.ops.aten.matmul.default, ((4, 2, 3, 8), (4, 2, 8, 5))),
    "bmm": (torch.ops.aten.bmm.default, ((4, 3, 8), (4, 8, 5))),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_program_made_on_a_gpu_calls_its_kernels_and_becomes_an_onnx_model(name: str) -> None:
    """Traced on fake tensors of a GPU: one kernel with `out_dtype`, no input in FP32. ONNX has no such product."""
    target, shapes = LINEAR[name]

    product = Function(lambda *inputs: _multiply(target, *(x.half() for x in inputs)))
    with FakeTensorMode(), torch.no_grad():
        program = torch.export.export(product, tuple(torch.empty(shape, device="cuda") for shape in shapes))
    targets = [node.target for node in program.graph.nodes]
    assert sum(target in TRANSLATIONS for target in targets) == 1
    casts = [node.args[1] for node in program.graph.nodes if node.target is torch.ops.aten.to.dtype]
    assert set(casts) == {torch.float16}

    how: dict[str, Any] = {"dynamo": True, "verbose": False, "optimize": False}
    content = as_bytes(tidy(torch.onnx.export(program, custom_translation_table=TRANSLATIONS, **how).model))
    onnx.checker.check_model(content, full_check=True)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    inputs = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    fed = {port.name: x.numpy() for port, x in zip(session.get_inputs(), inputs, strict=True)}
    exact = target(*(x.half().float() for x in inputs))
    torch.testing.assert_close(torch.from_numpy(session.run(None, fed)[0]), exact, rtol=0, atol=1e-5)


def test_a_graph_with_such_a_product_runs_before_it_is_saved() -> None:
    """The replay of the search: values as in the saved program."""
    model = seeded(overflowing)
    planning = planning_of(model, X, formats=("fp16",))
    exported = export_model(model, planning.subject.batches[0])
    table = table_of(exported.graph_module.graph, "fp16", planning)
    module = lower_operations(exported, table, frozenset(("linear",)))
    low = [x.half().float() for x in (X, model.head.weight.detach(), model.head.bias.detach())]
    with torch.no_grad():
        assert torch.equal(module(X), F.log_softmax(F.linear(*low) / 1e5, -1))
