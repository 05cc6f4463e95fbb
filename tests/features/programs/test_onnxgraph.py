"""ONNX models with fewer nodes: equal results, no notes of the exporter, one floating-point type at each operator."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, checker, helper
from torch import Tensor, nn

from auditor.features.programs.exported import export_model, save_program
from auditor.features.programs.onnxfile import TRANSLATIONS, as_bytes, read
from auditor.features.programs.onnxgraph import check_types, fold_batch_norms, tidy
from auditor.isolation.outputs import tensor_outputs
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

SIZES = (({0: "n"},),)
"""The batch size of a Function's only argument is variable."""

HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT


def exported(model: nn.Module, *args: Tensor, sizes: Any = None) -> Any:
    """The model as torch exports it, unsimplified."""
    how: dict[str, Any] = {"dynamo": True, "verbose": False, "optimize": False, "dynamic_shapes": sizes}
    with torch.no_grad():
        return torch.onnx.export(model.eval(), args, custom_translation_table=TRANSLATIONS, **how).model


def simplified(model: nn.Module, *args: Tensor, sizes: Any = None) -> onnx.ModelProto:
    made = tidy(exported(model, *args, sizes=sizes), model.state_dict())
    checker.check_model(as_bytes(made), full_check=True)
    return onnx.load_from_string(as_bytes(made))


def ran(made: onnx.ModelProto, *args: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    fed = {port.name: x.numpy() for port, x in zip(session.get_inputs(), args, strict=True)}
    return torch.from_numpy(session.run(None, fed)[0])


def operators(made: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in made.graph.node]


# Batch norms are folded into what is before them, and rounded once.


def spread(norm: nn.Module) -> nn.Module:
    """A batch norm with statistics and weights as training leaves them."""
    for x, low in ((norm.weight, 0.5), (norm.bias, -1.0), (norm.running_mean, -1.0), (norm.running_var, 0.5)):
        x.data = low + torch.rand_like(x)
    return norm


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Conv": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), spread(nn.BatchNorm2d(6))), 4),
    "ConvTranspose": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2), spread(nn.BatchNorm2d(6))), 4),
    "Gemm": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(100, 6), spread(nn.BatchNorm1d(6))), 4),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_batch_norm_is_folded(kind: str) -> None:
    make, channels = LAYERS[kind]
    model, x = seeded(make).eval(), normal(2, channels, 5, 5)
    made = simplified(model, x)
    assert [each for each in operators(made) if each != "Reshape"] == [kind]
    torch.testing.assert_close(ran(made, x), model(x), rtol=1e-4, atol=1e-5)


def test_folded_weights_are_rounded_once() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv1d(64, 8, 1), spread(nn.BatchNorm1d(8)))).eval()
    conv, norm = (module for module in model)
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    exact = (conv.weight.double() * scale[:, None, None]).detach()
    given = {name: x.clone() for name, x in model.state_dict().items()}
    made = exported(model.half(), normal(1, 64, 3).half())
    tidy(made, given)
    (weight,) = [x.const_value.numpy() for x in made.graph.initializers.values() if x.shape.numpy() == (8, 64, 1)]
    assert np.array_equal(weight, exact.half().numpy())


def test_a_batch_norm_stays_where_folded_weights_would_overflow() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))).eval()
    model[1].weight.data.fill_(6e4)
    model[0].weight.data.fill_(2.0)
    assert "BatchNormalization" in operators(simplified(model.half(), normal(1, 4, 3).half()))


def test_a_frozen_batch_norm_is_folded() -> None:
    scale, shift = torch.tensor([2.0, 3.0, 0.5])[:, None, None], torch.tensor([1.0, -1.0, 0.0])[:, None, None]
    model = Model(lambda m, x: m.conv(x) * scale + shift, conv=nn.Conv2d(2, 3, 1, bias=False)).eval()
    x = normal(2, 2, 4, 4)
    made = simplified(model, x)
    assert operators(made) == ["Conv"]
    torch.testing.assert_close(ran(made, x), model(x), rtol=1e-5, atol=1e-6)


def test_a_batch_norm_in_another_type_stays() -> None:
    """The plan's cast between both stays too."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"]),
        helper.make_node("Cast", ["y"], ["wide"], to=FULL),
        helper.make_node("BatchNormalization", ["wide", "one", "zero", "zero", "one"], ["z"]),
    ]
    weights = [
        helper.make_tensor("w", HALF, [1, 1, 1], [2.0]),
        helper.make_tensor("one", FULL, [1], [1.0]),
        helper.make_tensor("zero", FULL, [1], [0.0]),
    ]
    ports = [helper.make_tensor_value_info(name, kind, [1, 1, 4]) for name, kind in (("x", HALF), ("z", FULL))]
    graph = helper.make_graph(nodes, "apart", ports[:1], ports[1:], weights)
    made = read(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    fold_batch_norms(made.graph, {})
    assert [node.op_type for node in made.graph] == ["Conv", "Cast", "BatchNormalization"]


# Attention


def heads(x: Tensor, **others: Any) -> Tensor:
    each = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(each, each, each, **others).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("attend", "nodes"),
    [
        (heads, ["MatMul", "MatMul", "Mul", "Reshape", "Reshape", "Softmax", "Transpose", "Transpose", "Transpose"]),
        (lambda x: heads(x, is_causal=True), None),
        (lambda x: heads(x, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()), None),
        (lambda x: heads(x, attn_mask=x[:, None, :, :5]), None),
        (lambda x: heads(x, attn_mask=x[:, None, :, :5] > 0, scale=0.3), None),
    ],
)
def test_attention_has_one_scaling_and_hides_no_nan(
    attend: Callable[[Tensor], Tensor], nodes: list[str] | None
) -> None:
    x = normal(2, 5, 8)
    made = simplified(Function(attend), x, sizes=SIZES)
    if nodes is not None:
        assert sorted(operators(made)) == nodes
    asks = "Greater" in operators(made)
    assert ("IsNaN" in operators(made)) is asks
    for batch in (x, normal(3, 5, 8)):
        torch.testing.assert_close(ran(made, batch), attend(batch), rtol=1e-4, atol=1e-5)


def test_a_row_without_true_is_zero() -> None:
    made = simplified(Function(lambda x: heads(x, attn_mask=x[:, None, :, :5] > 9)), normal(2, 5, 8))
    assert not ran(made, normal(2, 5, 8)).any()


# What depends on the batch size alone


def test_rows_that_are_equal_for_any_batch_size_are_one_and_others_stay() -> None:
    def same(x: Tensor) -> Tensor:
        place = torch.arange(3).expand(x.shape[0], 3)
        return x.masked_fill((place > 1).cumsum(1) > 0, 0.0)

    made = simplified(Function(same), normal(4, 3), sizes=SIZES)
    assert operators(made) == ["Where"]
    for size in (1, 2, 7):
        x = normal(size, 3)
        assert torch.equal(ran(made, x), same(x))
    other = Function(lambda x: x + torch.arange(x.shape[0])[:, None].expand(x.shape[0], 3))
    made = simplified(other, normal(4, 3), sizes=SIZES)
    assert torch.equal(ran(made, torch.zeros(6, 3)), torch.arange(6.0)[:, None].expand(6, 3))


def test_what_is_nearly_neutral_stays() -> None:
    x = torch.tensor([1.0, 0.0])
    made = simplified(Function(lambda x: x * (1 + 1e-6) + 1e-9), x)
    assert operators(made) == ["Mul", "Add"]
    assert operators(simplified(Function(lambda x: (x * 1.0 + 0.0).exp()), x)) == ["Exp"]


# What is in the file


def test_no_stack_trace_and_no_path_is_in_the_file() -> None:
    made = simplified(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), normal(2, 3))
    assert b"File " not in made.SerializeToString()
    assert {entry.key for node in made.graph.node for entry in node.metadata_props} == {"namespace"}


def one_node(op: str, kinds: list[int], **attributes: Any) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(f"x{index}", kind, [2]) for index, kind in enumerate(kinds)]
    node = helper.make_node(op, [port.name for port in ports], ["y"], **attributes)
    graph = helper.make_graph([node], "one", ports, [helper.make_tensor_value_info("y", kinds[0], [2])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def test_types_are_one_at_each_operator() -> None:
    check_types(one_node("Pow", [HALF, HALF]))
    check_types(one_node("Pow", [FULL, TensorProto.INT64]))
    checker.check_model(one_node("Pow", [HALF, FULL]), full_check=True)
    with pytest.raises(TypeError, match="Pow : its inputs have two floating-point types"):
        check_types(one_node("Pow", [HALF, FULL]))
    with pytest.raises(Exception, match="Add"):
        check_types(one_node("Add", [HALF, FULL]))
    with pytest.raises(Exception, match=r"unsupported type: tensor\(int64\)"):
        check_types(one_node("Exp", [TensorProto.INT64]))


# Stock models


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, use_cache=False
    )
    tokens = torch.randint(2, 32, (2, 6))
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": tokens,
        "decoder_input_ids": tokens[:, :4],
    }  # not contiguous


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(2, 32, (2, 6))}


@pytest.mark.parametrize("make", thinned([llama, t5]))
def test_a_stock_model_needs_at_most_the_nodes_of_the_plain_exporter(make: Callable[[], Any]) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, given = make()
    for x in model.parameters():
        x.data += 0.01 * torch.randn_like(x)  # biases of zero would be dropped
    model.eval()
    graph = export_model(model, ((), given))
    assert not graph.fixed
    program = torch.export.load(io.BytesIO(save_program(graph.graph_module, graph).content))
    made = simplified_program(program)
    with torch.no_grad():
        expected, again = (tensor_outputs(run(**given))[0] for run in (model, program.module()))
    torch.testing.assert_close(again, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ran(made, *given.values()), expected, rtol=1e-3, atol=1e-4)
    try:
        plain = torch.onnx.export(model, (), kwargs=given, dynamo=True, verbose=False)
    except RuntimeError:
        return  # as torch 2.13 does on T5
    assert len(made.graph.node) <= len(plain.model.graph)


def simplified_program(program: Any) -> onnx.ModelProto:
    with torch.no_grad():
        how: dict[str, Any] = {"dynamo": True, "verbose": False, "optimize": False}
        made = torch.onnx.export(program, custom_translation_table=TRANSLATIONS, **how)
    proto = onnx.load_from_string(as_bytes(tidy(made.model)))
    check_types(proto)
    return proto
