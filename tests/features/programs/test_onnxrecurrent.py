"""Recurrent layers in ONNX: one node per layer, no computed shapes, outputs equal to those of torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import checker
from torch import Tensor, nn

import auditor
from auditor.features.programs.onnxfile import TRANSLATIONS, as_bytes, with_onnx
from auditor.features.programs.onnxgraph import check_types, tidy
from auditor.isolation.outputs import tensor_outputs
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

BATCH = torch.export.Dim("batch")

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM, two layers, both directions": lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True),
    "LSTM without biases": lambda: nn.LSTM(8, 6, bias=False, bidirectional=True, batch_first=True),
    "GRU, three layers, both directions": lambda: nn.GRU(8, 6, num_layers=3, bidirectional=True, batch_first=True),
    "RNN of ReLU": lambda: nn.RNN(8, 6, bidirectional=True, nonlinearity="relu", batch_first=True),
}


def exported(model: nn.Module, *args: Tensor) -> onnx.ModelProto:
    """The simplified ONNX model, for any batch size."""
    how: dict[str, Any] = {"dynamo": True, "verbose": False, "optimize": False}
    with torch.no_grad():
        sizes = (tuple({0: BATCH} for _ in args),)
        made = torch.onnx.export(
            model.eval(), args, custom_translation_table=TRANSLATIONS, dynamic_shapes=sizes, **how
        ).model
    content = as_bytes(tidy(made, model.state_dict()))
    checker.check_model(content, full_check=True)
    check_types(onnx.load_from_string(content))
    return onnx.load_from_string(content)


def outputs(made: onnx.ModelProto, *args: Tensor) -> list[Any]:
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    fed = {port.name: x.numpy() for port, x in zip(session.get_inputs(), args, strict=True)}
    return list(session.run(None, fed))


@pytest.mark.parametrize("name", thinned(LAYERS, 2))
def test_a_recurrent_layer_is_one_node_with_equal_outputs(name: str) -> None:
    layer = seeded(LAYERS[name]).eval()
    made = exported(Model(lambda m, x: m.layer(x), layer=layer), normal(3, 5, 8))
    kinds = [node.op_type for node in made.graph.node]
    assert kinds.count(layer.mode.partition("_")[0]) == layer.num_layers
    assert not {"Shape", "Slice", "Expand", "Mul"} & set(kinds)
    for size in (1, 3, 4):
        x = normal(size, 5, 8)
        for one, other in zip(outputs(made, x), tensor_outputs(layer(x)), strict=True):
            np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_given_states_stay() -> None:
    layer = seeded(lambda: nn.GRU(8, 6, num_layers=2, batch_first=True)).eval()
    model = Model(lambda m, x, state: m.layer(x, state.transpose(0, 1).contiguous()), layer=layer)
    given = normal(3, 5, 8), normal(3, 2, 6)
    found, _ = outputs(exported(model, *given), *given)
    expected, _ = layer(given[0], given[1].transpose(0, 1).contiguous())
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_learned_states_stay_and_zeros_go() -> None:
    layer = seeded(lambda: nn.GRU(8, 6, batch_first=True)).eval()
    states = {"learned": normal(1, 3, 6), "zeros": torch.zeros(1, 3, 6)}
    given = normal(3, 5, 8)
    for name, state in states.items():
        model = Model(lambda m, x: m.layer(x, m.state)[0], layer=layer, state=nn.Parameter(state))
        with torch.no_grad():
            made = torch.onnx.export(
                model.eval(),
                (given,),
                dynamo=True,
                verbose=False,
                optimize=False,
                custom_translation_table=TRANSLATIONS,
            ).model
        model_proto = onnx.load_from_string(as_bytes(tidy(made, model.state_dict())))
        (node,) = (node for node in model_proto.graph.node if node.op_type == "GRU")
        has_state = len(node.input) > 5 and bool(node.input[5])
        assert has_state == (name == "learned")
        (found,) = outputs(model_proto, given)
        expected, _ = layer(given, state)
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_large_weights_are_stored_in_the_order_of_onnx() -> None:
    layer = seeded(lambda: nn.LSTM(256, 256, bidirectional=True, batch_first=True)).eval()
    made = exported(Model(lambda m, x: m.layer(x)[0], layer=layer), normal(2, 3, 256))
    kinds = [node.op_type for node in made.graph.node]
    assert sorted(kinds) == ["LSTM", "Reshape", "Transpose", "Transpose", "Transpose"]


class Tagger(nn.Module):
    """A bidirectional LSTM of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, 5] of [b, s, 8]."""
        return self.head(self.rnn(x)[0])


def test_a_plan_adds_casts_alone_and_runs_in_onnxruntime() -> None:
    model, x = seeded(Tagger).eval(), normal(3, 7, 8)
    plain = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    audit = with_onnx(auditor.audit(model, x, strategies="graph", formats="fp16", device="cpu", quick=True))
    nodes = onnx.load_from_string(audit.programs["graph_fp16.onnx"]).graph.node
    kinds = [node.op_type for node in nodes]
    assert len(kinds) - kinds.count("Cast") <= len(plain.model.graph)
    program = audit.plans["graph_fp16"].program
    assert program is not None
    assert program.onnx is not None
    assert program.onnx.failure is None
    assert (program.onnx.error or 1.0) < 0.01
    assert (program.onnx.rounded_error or 1.0) < 0.01
