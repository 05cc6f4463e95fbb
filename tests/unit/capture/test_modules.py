"""Modules of every make: scripted, traced, frozen, quantised, parametrised, recurrent, lazy, without a forward of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.replaying import Model, kinds, linear, operations, replayed
from tests.support.subjects import capture_of, nodes_by_op, normal, only

X = normal(3, 4)


def small() -> nn.Sequential:
    return nn.Sequential(linear(4, 4), nn.ReLU(), linear(4, 2, seed=1)).eval()


class Gated(nn.Module):
    """Branches and loops, which only scripting keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if bool(x.sum() > -100):
                x = torch.tanh(self.layer(x))
        return x


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(small()),
    "traced": lambda: torch.jit.trace(small(), X),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(small())),
    "control flow": lambda: torch.jit.script(Gated()),
}


@pytest.mark.parametrize("name", SCRIPTED)
def test_scripts(name: str) -> None:
    whole = SCRIPTED[name]()
    method = "path" if name == "control flow" else "run"
    found = replayed(whole, X, method=method)
    assert "input" in kinds(found)
    found = replayed(Model(lambda self, x: self.part(x * 2).exp(), part=SCRIPTED[name]()), X, method=method)
    assert found.nodes[found.outputs[0]].owner == ""
    assert {node.owner for node in found.nodes.values()} >= {"", "part"}


def test_statically_quantised_layers() -> None:
    engine = torch.backends.quantized.engine
    inner = torch.ao.quantization.QuantWrapper(small())
    inner.qconfig = torch.ao.quantization.get_default_qconfig(engine if engine != "none" else "fbgemm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.prepare(inner, inplace=True)
        inner(X)
        torch.ao.quantization.convert(inner, inplace=True)
    found = replayed(Model(lambda self, x: self.part(self.first(x)), first=linear(4, 4), part=inner), X)
    assert {"quantize_per_tensor", "dequantize"} <= set(operations(found))


@pytest.mark.parametrize("parametrised", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrised_weights(parametrised: Callable[[nn.Module], nn.Module]) -> None:
    found = replayed(nn.Sequential(parametrised(linear(4, 4)), nn.Tanh()).eval(), X)
    assert only(found, "linear").owner == "0"
    assert any(p.fqn and "parametrizations" in p.fqn for p in found.placeholders)


def test_modules_without_a_forward_of_their_own() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.layers["in"].forward(x)  # past __call__, so past hooks: its caller owns it
        for layer in self.stack:
            x = layer(x)
        return nn.functional.linear(x, self.weights[0], None)

    model = Model(
        forward,
        layers=nn.ModuleDict({"in": linear(4, 4)}),
        stack=nn.ModuleList([linear(4, 4), nn.Identity()]),
        weights=nn.ParameterList([normal(2, 4)]),
    )
    found = replayed(model, X)
    assert [node.owner for node in nodes_by_op(found, "linear")] == ["", "stack.0", ""]
    assert {p.fqn for p in found.placeholders if p.kind == "parameter"} >= {"weights.0", "layers.in.weight"}


def test_hooks_of_the_users_own_are_run() -> None:
    model = small()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert operations(replayed(model, X)) == ["linear", "mul", "relu", "add", "linear"]


def test_recurrent_layers_stay_whole() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.LSTM(4, 3, 2, bidirectional=True), nn.GRU(4, 3), nn.RNN(4, 3), nn.LSTM(4, 3, proj_size=2)]
    for layer, name in zip(layers, ("lstm", "gru", "rnn_tanh", "lstm"), strict=True):
        found = replayed(layer, normal(5, 2, 4))
        assert len(nodes_by_op(found, name)) == 1


def test_the_first_state_of_a_recurrent_layer_follows_the_dtype() -> None:
    found = capture_of(nn.GRU(4, 4, 2, bidirectional=True), normal(10, 1, 4))
    assert only(found, "zeros").literals["fp16"].arguments == {"dtype": torch.float16}
    assert len(nodes_by_op(found, "gru")) == 1
