"""Values of other dtypes and layouts than dense FP32 pass through the recording as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.replaying import Model, kinds, linear, operations, replayed
from tests.support.subjects import nodes_by_op, normal

X = normal(4, 8)
COO = torch.eye(4).to_sparse()
CSR = (torch.eye(4) * 2).to_sparse_csr()

CASTS: dict[str, Callable[[Tensor], Any]] = {
    "fp16": lambda x: (x.half() @ x.half().t()).float(),
    "bf16": lambda x: torch.softmax(x.bfloat16(), -1),
    "fp64": lambda x: torch.linalg.svdvals(x.double()).float() * 2,
    "fp8 e4m3": lambda x: x.to(torch.float8_e4m3fn).float() * 2,
    "fp8 e5m2": lambda x: x.to(torch.float8_e5m2).to(torch.bfloat16) * 2,
    "int8": lambda x: (x * 10).to(torch.int8).float() / 10,
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(4, 4, 2)) * torch.polar(x[:, :4], x[:, 4:])),
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.exp(1j * x[:, :5])),
    "stft": lambda x: torch.stft(x.flatten(), 8, window=torch.hann_window(8), return_complex=True).abs(),
    "complex result": lambda x: torch.complex(x, x.exp()),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 2, torch.quint8).dequantize() * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_dtypes(name: str) -> None:
    assert kinds(replayed(Model(lambda self, x: CASTS[name](x)), X))[:1] in (["input"], ["constant"])


SPARSE: dict[str, Callable[..., Any]] = {
    "coo buffer": lambda self, x: torch.sparse.mm(self.coo, x) + self.coo @ x,
    "csr buffer": lambda self, x: self.csr @ x,
    "made in forward": lambda self, x: torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 3]]), x[0, :2], (4, 4)) @ x,
    "added up": lambda self, x: (self.coo + self.coo * 2).coalesce().values() * x[0, :4],
    "to dense": lambda self, x: self.coo.to_dense() @ x + self.csr.to_dense() @ x,
    "softmax": lambda self, x: torch.sparse.softmax(self.coo, 1).to_dense() @ x,
    "returned": lambda self, x: (self.coo * 2, x.exp()),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_layouts(name: str) -> None:
    replayed(Model(SPARSE[name], coo=COO, csr=CSR), X)


def test_values_made_sparse_in_forward() -> None:
    replayed(Model(lambda self, x: x.relu().to_sparse() @ x.t()), X)
    replayed(Model(lambda self, x: x.relu().to_sparse_csr() @ x.t()), X)


def parts(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([x[:1], x[1:4]], layout=layout)


def test_nested_in_strides() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.layer(torch.nested.as_nested_tensor([x[:1], x[1:4]])).relu() * 2
        return hidden.to_padded_tensor(0.0)

    found = replayed(Model(forward, layer=linear(8, 8)), X)
    assert [node.owner for node in nodes_by_op(found, "linear")] == ["layer"]


def test_nested_tensors_that_are_returned() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        whole = torch.nested.as_nested_tensor([x[:1], x[1:4]])
        return whole, [part * 2 for part in whole.unbind()]

    replayed(Model(forward), X)


def test_nested_in_a_jagged_layout() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        ragged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]))
        hidden = self.norm(self.layer(ragged)).relu() * 2
        return hidden.to_padded_tensor(0.0), hidden.values()

    found = replayed(Model(forward, layer=linear(8, 8), norm=nn.LayerNorm(8)), X)
    assert {"linear", "layer_norm", "relu"} <= set(operations(found))
    assert "input" in kinds(found)


def test_attention_over_a_jagged_layout() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        ragged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]), min_seqlen=1, max_seqlen=3)
        q = self.layer(ragged).unflatten(-1, [2, 4]).transpose(1, 2)
        result = nn.functional.scaled_dot_product_attention(q, q, q)
        return result.transpose(1, 2).flatten(-2).values()

    replayed(Model(forward, layer=linear(8, 8)), X)


def test_nested_inputs() -> None:
    for layout in (torch.strided, torch.jagged):
        replayed(Model(lambda self, x: (x * 2).to_padded_tensor(0.0)), parts(X, layout))


def test_packed_sequences() -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(forward, gru=nn.GRU(8, 4, bidirectional=True, batch_first=True))
    found = replayed(model, normal(2, 5, 8), torch.tensor([3, 5]), method="path")
    assert len(nodes_by_op(found, "gru")) == 1


def test_a_model_stored_low_in_part() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.low(x.bfloat16()).float() + self.high(x)

    found = replayed(Model(forward, low=linear(8, 8).bfloat16(), high=linear(8, 8)), X)
    assert [node.dtype for node in nodes_by_op(found, "linear")] == ["bfloat16", "float32"]
