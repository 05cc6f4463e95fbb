"""Recurrent layers and unrolled cells, short and long."""

from __future__ import annotations

from torch import Tensor, nn

from tests.rules.case import Case, ramp


class Unrolled(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return h


class UnrolledLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return h


class GruUpcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.float())[0]


def calls(cell: str, count: int) -> set[str]:
    return {cell if index == 0 else f"{cell}_{index}" for index in range(count)}


ALL = ("RNN001", "RNN002", "RNN003", "RNN004")

CASES = (
    Case(
        "long gru", lambda: nn.GRU(3, 4, batch_first=True), (ramp(1, 65, 3),), {"RNN001": {"gru"}}, ("RNN004", "RNN002")
    ),
    Case("long lstm", lambda: nn.LSTM(3, 4), (ramp(100, 1, 3),), {"RNN001": {"lstm"}}, ("RNN004",)),
    Case("short gru, wide batch", lambda: nn.GRU(3, 4), (ramp(64, 100, 3),), {"RNN004": {"gru"}}, ("RNN001",)),
    Case(
        "short lstm",
        lambda: nn.LSTM(3, 4, batch_first=True),
        (ramp(2, 8, 3),),
        {"RNN004": {"lstm"}},
        ("RNN001", "RNN002", "RNN003"),
    ),
    Case("relu rnn", lambda: nn.RNN(3, 4, nonlinearity="relu"), (ramp(8, 2, 3),), {"RNN002": {"rnn_relu"}}),
    Case(
        "relu cells",
        lambda: Unrolled(nn.RNNCell(3, 4, nonlinearity="relu")),
        (ramp(1, 2, 3),),
        {"RNN002": calls("rnn_relu_cell", 2)},
    ),
    Case("tanh rnn", lambda: nn.RNN(3, 4), (ramp(8, 2, 3),), {"RNN004": {"rnn_tanh"}}, ("RNN002",)),
    Case(
        "gru cells",
        lambda: Unrolled(nn.GRUCell(3, 4)),
        (ramp(1, 17, 3),),
        {"RNN003": calls("gru_cell", 17)},
        ("RNN001",),
    ),
    Case("tanh cells", lambda: Unrolled(nn.RNNCell(3, 4)), (ramp(1, 20, 3),), {"RNN003": calls("rnn_tanh_cell", 20)}),
    Case("few gru cells", lambda: Unrolled(nn.GRUCell(3, 4)), (ramp(1, 16, 3),), {}, ALL),
    Case("lstm cells", UnrolledLstm, (ramp(1, 20, 3),), {}, ALL),
    # autocast lowers a recurrent layer whatever its input: the upcast is undone
    Case("gru, upcast", GruUpcast, (ramp(1, 100, 3),), {"BND005": {"gru"}}, ALL),
)
