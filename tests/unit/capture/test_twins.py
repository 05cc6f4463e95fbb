"""Every operation of torch that writes is recorded as one that returns: its twin, or itself on copies."""

from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.capture.functional import WritesOnCopies, positional, promotes, twin_of, with_defaults, written_arguments
from auditor.numerics.nodes import mutates, operation_of

aten = torch.ops.aten


def every_write() -> list[Any]:
    """The operations of ATen that write to an argument."""
    every = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    names = sorted(name.partition(".") for name in every)
    return [
        op for op in (getattr(getattr(aten, packet), rest or "default") for packet, _, rest in names) if mutates(op)
    ]


def in_place(op: Any) -> bool:
    name = operation_of(op).name
    return name.endswith("_") and not name.endswith("__") and not any(a.is_out for a in op._schema.arguments)


def moves(op: Any) -> bool:
    """Whether it gives its argument another shape, or other memory."""
    return operation_of(op).view == "always" or operation_of(op).replaces_memory


def test_every_twin_takes_what_its_operation_takes_and_writes_nothing() -> None:
    for op in every_write():
        twin = twin_of(op)
        if twin is None:
            continue
        schema = getattr(twin, "stands_for", twin)._schema
        wanted = [str(a.type) for a in op._schema.arguments if not a.is_out]
        assert [str(a.type) for a in schema.arguments] == wanted, op
        assert not schema.is_mutable, op
        assert len(schema.returns) >= len(written_arguments(op)), op


ALONE = frozenset(
    "rrelu_with_noise_ polygamma_ _index_put_impl_ _sobol_engine_ff_ _sobol_engine_initialize_state_ "
    "_sobol_engine_scramble_ _fill_mem_eff_dropout_mask_ fill_diagonal_ __iand__ __ilshift__ __ior__ __irshift__ __ixor__".split()
)
"""Operations whose twin is missing, or takes its arguments in another order: they run on copies."""


def test_operations_in_place_without_a_twin_are_these() -> None:
    writes = (op for op in every_write() if in_place(op) and not (moves(op) or operation_of(op).writes_nothing))
    assert {operation_of(op).name for op in writes if twin_of(op) is None} <= ALONE


CALLS: dict[str, tuple[Any, ...]] = {
    "unary": (),
    "number": (0.5,),
    "tensor": (torch.full((3, 4), 0.5),),
    "mask": (torch.eye(3, 4) > 0, 0.25),
    "dim and number": (0, torch.tensor([1, 2]), 0.5),
    "dim, index and tensor": (0, torch.tensor([0, 1, 2]), torch.full((3, 4), 0.5)),
    "two numbers": (0.1, 0.9),
    "two tensors": (torch.full((3, 4), 0.5), torch.full((3, 4), 0.25)),
}


def test_twins_compute_what_their_operations_write() -> None:
    """Every operation in place that takes one of a few kinds of arguments, on FP32 and on integers."""
    tried = 0
    for op in every_write():
        if (
            not in_place(op)
            or twin_of(op) is None
            or moves(op)
            or op._schema.name.startswith(("aten::_", "aten::copy_"))
        ):
            continue
        for args in CALLS.values():
            for x in (torch.rand(3, 4), torch.randint(1, 9, (3, 4))):
                tried += agrees(op, x, args)
    assert tried > 200


def agrees(op: Any, x: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether the operation takes these arguments; it is an error if its twin gives something else."""
    written, twin = x.clone(), twin_of(op)
    state = torch.get_rng_state()
    try:
        op(written, *args)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return False
    if written.shape != x.shape:
        return False
    torch.set_rng_state(state)
    result = twin(*with_defaults(op, (x.clone(), *args)))
    given = [x, *(y for y in args if isinstance(y, Tensor))]
    assert result.dtype is x.dtype or promotes(op, x, given), f"{op} on {x.dtype}: {result.dtype}"
    assert torch.equal(result.to(x.dtype).nan_to_num(7), written.nan_to_num(7)), op
    return True


def test_operations_without_a_twin_run_on_copies() -> None:
    op = aten._fused_moving_avg_obs_fq_helper.default
    low, high, scale = (torch.tensor([value]) for value in (0.0, 1.0, 1.0))
    zero = torch.tensor([0], dtype=torch.int32)
    args = (torch.linspace(-3, 3, 5), torch.tensor([1]), torch.tensor([1]), low, high, scale, zero, 0.5, 0, 255, 0)
    written = WritesOnCopies(op, written_arguments(op))
    (result, _), copies = written(*args)
    assert low.item() == 0
    assert copies[0].item() == -1.5
    expected, _ = op(*args)
    assert torch.equal(result, expected)
    assert [x.item() for x in (low, high, scale, zero)] == [x.item() for x in copies]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"other": 2}, ((1, 2), {})),
        ({"alpha": 3}, ((1,), {"alpha": 3})),
        ({"alpha": 3, "other": 2}, ((1, 2), {"alpha": 3})),
    ],
)
def test_keywords_go_where_they_may_stand(kwargs: dict[str, Any], expected: Any) -> None:
    assert positional(aten.add.Tensor, (1,), kwargs) == expected
