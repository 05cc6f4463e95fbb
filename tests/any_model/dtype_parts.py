"""Parts that hold or compute what is no float32: wider, half, whole, complex, sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.any_model.parts import DTYPES, Holding, Part, kept


@kept(DTYPES)
def wide(k: int) -> Part:
    return [
        lambda h: h.double().cumsum(-1).to(h.dtype) / 8,
        lambda h: (h.double() @ torch.eye(8, dtype=torch.float64)).float(),
        Holding(lambda m, h: (h * m.table).to(h.dtype), table=torch.linspace(0, 1, 8, dtype=torch.float64)),
        lambda h: h * torch.tensor(0.5, dtype=torch.float64),
    ][k % 4]


@kept(DTYPES)
def half(k: int) -> Part:
    return [
        lambda h: h.half().float() * 1.5,
        lambda h: h.bfloat16().relu().float(),
        Holding(lambda m, h: h * m.table, table=torch.linspace(0, 1, 8).half()),
        Holding(lambda m, h: (h.half() @ m.table).float(), table=torch.eye(8).half()),
        lambda h: h.to(torch.float8_e4m3fn).to(h.dtype),
    ][k % 5]


@kept(DTYPES)
def discrete(k: int) -> Part:
    return [
        lambda h: h + (h * 4).round().int().float() / 4,
        lambda h: h * (h > 0),
        lambda h: h + ((h * 8).long() % 3),
        lambda h: h * torch.logical_xor(h > 0, h > 1).to(h.dtype),
        lambda h: torch.quantize_per_tensor(h.float(), 0.1, 0, torch.qint8).dequantize(),
        lambda h: torch.fake_quantize_per_tensor_affine(h.float(), 0.05, 0, -128, 127),
        lambda h: h + torch.bucketize(h, torch.linspace(-1, 1, 5)),
        lambda h: (h.sigmoid() * 255).to(torch.uint8).float() / 255,
    ][k]


@kept(DTYPES)
def complexes(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        z = torch.view_as_complex(h.float().reshape(-1, 4, 2).contiguous())
        z = z * m.turn if k % 2 else torch.conj(z) * 1j
        return torch.view_as_real(z.resolve_conj()).reshape(-1, 8)

    return Holding(run, turn=torch.polar(torch.ones(4), torch.arange(4.0)))


@kept(DTYPES)
def sparse(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 3 == 0:
            return torch.sparse.mm(m.eye, h.T).T
        if k % 3 == 1:
            return h.relu().to_sparse().to_dense()
        return torch.sparse.softmax(h.to_sparse(), 1).to_dense()

    return Holding(run, eye=torch.eye(8).to_sparse())
