"""Discrete choices: top-k, arg max, expanded distances, indices from arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.rules.case import Case, on, raised, ramp


def chosen(scores: Tensor) -> Tensor:
    return scores.softmax(-1).topk(2)[0]


def largest(x: Tensor) -> Tensor:
    return x.amax(-1)  # a value, no choice


def expanded(x: Tensor, codes: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True) + (codes * codes).sum(-1)[None] - 2 * x @ codes.t()


def expanded_in_place_of_cdist(x: Tensor, codes: Tensor) -> Tensor:
    return x.pow(2).sum(1, keepdim=True) - 2.0 * torch.matmul(x, codes.t()) + codes.pow(2).sum(1)


def direct(x: Tensor, codes: Tensor) -> Tensor:
    return (x[:, None] - codes[None]).pow(2).sum(-1)


def bucket(x: Tensor) -> Tensor:
    return (x * 100.0).to(torch.long)


def bucket_upcast(x: Tensor) -> Tensor:
    return (x.float() * 100.0).to(torch.long)


def mask_to_count(x: Tensor) -> Tensor:
    return x * (x > 0).to(torch.long).sum(-1, keepdim=True).to(x.dtype)


EDGES = torch.tensor([-0.5, 0.0, 0.5])
X = ramp(3, 4)
CODES = ramp(5, 4, scale=2)

CASES = (
    Case("router", *on(chosen, X), {"RTE001": {"topk"}}, ("RTE002",)),
    Case("sorted", *on(lambda x: x.sort(-1)[0], X), {"RTE001": {"sort"}}, ("RTE002", "RTE004")),
    Case("router, upcast", *on(raised(chosen), X), {}, ("RTE001",)),
    Case("largest", *on(largest, X), {}, ("RTE001", "RTE002")),
    Case("greedy", *on(lambda x: x.argmax(-1) + x, ramp(4, 4)), {"RTE002": {"argmax"}}),
    Case("nearest", *on(lambda x, c: direct(x, c).argmin(-1) + x[:, 0], X, CODES), {"RTE002": {"argmin"}}, ("RTE003",)),
    Case("greedy, upcast", *on(lambda x: x.float().argmax(-1) + x.float(), ramp(4, 4)), {}, ("RTE002",)),
    Case("expanded", *on(expanded, X, CODES), {"RTE003": {"sub"}}),
    Case("expanded, another order", *on(expanded_in_place_of_cdist, X, CODES), {"RTE003": {"add"}}),
    Case("expanded, upcast", *on(raised(expanded), X, CODES), {}, ("RTE003",)),
    Case("direct", *on(direct, X, CODES), {}, ("RTE003",)),
    Case("bucket", *on(lambda x: (bucket(x), x.exp()), X), {"RTE004": {"to"}}),
    Case("bucketize", *on(lambda x: torch.bucketize(x, EDGES) + x, X), {"RTE004": {"bucketize"}}),
    Case("bucket, upcast", *on(lambda x: (bucket_upcast(x), x.exp()), X), {}, ("RTE004",)),
    Case("a count", *on(mask_to_count, X), {}, ("RTE004",)),
)
