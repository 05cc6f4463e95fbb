"""The lists of autocast against the dispatcher of the torch that is installed, and against what its autocast does."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.distributed._functional_collectives  # registers the collectives that the table has rows for

import auditor
from auditor.numerics import autocast_lists as lists
from auditor.numerics.autocast import autocast_arguments
from auditor.numerics.autocast_lists import LISTS, autocast_lists, of_header, registered
from auditor.numerics.flops import FORMULAS
from auditor.numerics.formats import FORMATS
from auditor.numerics.nodes import overload_named
from auditor.numerics.operations import Operation, operation, packet, packets, treatment
from auditor.resources import table
from tests.architectures.zoo import ZOO, specimen
from tests.support import autocast_calls
from tests.support.autocast_calls import FP32, LOWER, NONE, PROMOTE, Make
from tests.support.fake_cuda import autocast, first_dtype, overload
from tests.support.subjects import capture_of
from tests.support.thinned import thinned

KEYS = ("cuda", "cpu")
OUTSIDE_THE_HEADER = {"binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose", "linalg_matrix_sqrth"}
"""Operations of CUDA's autocast that torch lists in its C++ sources alone."""

FP16, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32

UNTRIED = {
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "gru_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_scaled_dot_product_flash_attention",
    "grid_sampler",
    "linalg_matrix_norm",
    "binary_cross_entropy",
    "linalg_matrix_sqrth",
}
"""Registered, and not in autocast_calls.py: fake tensors need CUDA or cuDNN to run them, or they refuse half all the same."""


def listed(device: str) -> list[str]:
    return [name for key in LISTS for name in table("numerics/autocast")[device].get(key, ())]


@pytest.mark.parametrize("device", KEYS)
def test_the_table_lists_what_torch_registers(device: str) -> None:
    missing = sorted(registered(device) - set(listed(device)))
    assert missing == [], f"torch {torch.__version__} registers more: edit auditor/numerics/autocast.toml, [{device}]"


@pytest.mark.parametrize("device", KEYS)
def test_names_of_other_releases_do_not_count(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in autocast.toml that the torch at hand does not register, as one that a release has dropped."""
    dropped = {"cuda": "exp", "cpu": "prod"}[device]
    assert autocast_lists(device)[dropped] == "fp32"
    known = registered(device)
    monkeypatch.setattr(lists, "registered", lambda device: known - {dropped})
    assert dropped not in autocast_lists.__wrapped__(device)


def test_a_name_of_a_later_release_counts_as_its_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    known, header = registered("cuda"), of_header()
    monkeypatch.setattr(lists, "registered", lambda device: known | {"newer", "unheard_of"})
    monkeypatch.setattr(lists, "of_header", lambda: {**header, "newer": "lower", "exp": "promote"})
    later = autocast_lists.__wrapped__("cuda")
    assert (later["newer"], later["exp"], later["unheard_of"]) == ("lower", "promote", "fp32")


def test_the_header_of_torch_is_read() -> None:
    """It lists most of what torch registers, and the table agrees with it in every name."""
    header, table_alone = of_header(), lists._listed(table("numerics/autocast")["cuda"])
    assert len(header) > 100
    assert {name: how for name, how in header.items() if table_alone.get(name) != how} == {}
    assert registered("cuda") - set(header) <= OUTSIDE_THE_HEADER


@pytest.mark.parametrize("device", KEYS)
def test_no_name_is_on_two_lists(device: str) -> None:
    composites = [name for rows in table("numerics/autocast")[device].get("composites", {}).values() for name in rows]
    names = listed(device) + composites
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_registered_operation_is_tried() -> None:
    tried = {*LOWER, *FP32, *PROMOTE}
    assert sorted(set(listed("cuda")) - tried - UNTRIED) == []


def test_the_cpu_is_another_policy() -> None:
    assert (treatment("aten.softmax.int", "cpu"), treatment("aten.cat.default", "cpu")) == ("none", "promote")
    assert treatment("aten.binary_cross_entropy.default", "cpu") == "fp32"


@pytest.fixture(params=["fake tensors", "cuda", "cpu"])
def called(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.dtype]:
    """The dtype of a call under autocast: torch's own, on fake tensors of CUDA; in a region of an emulated run, CUDA's too."""
    if emulated := request.param != "fake tensors":
        monkeypatch.setattr(autocast_calls, "index", lambda *shape: torch.zeros(shape, dtype=torch.int64))

    def run(calls: Any, name: str, *dtypes: torch.dtype, region: torch.dtype = FP16, **kwargs: Any) -> torch.dtype:
        with ExitStack() as stack:
            if emulated:
                stack.enter_context(auditor.emulate())
                stack.enter_context(torch.autocast(request.param, dtype=region))
            else:
                stack.enter_context(autocast(region))
            device = "cpu" if emulated else "cuda"
            makes = [lambda *shape, dtype=dtype: torch.full(shape, 0.5, dtype=dtype, device=device) for dtype in dtypes]
            return first_dtype(overload(name)(*calls[name](*makes), **kwargs))

    return run


@pytest.mark.parametrize("name", LOWER)
def test_autocast_lowers(name: str, called: Callable[..., torch.dtype]) -> None:
    assert treatment(f"aten.{name}") == "lower"
    assert [called(LOWER, name, WIDE, region=region) for region in (FP16, BF16)] == [FP16, BF16]


@pytest.mark.parametrize("name", FP32)
def test_autocast_raises(name: str, called: Callable[..., torch.dtype]) -> None:
    assert treatment(f"aten.{name}") in ("fp32", "fp32_unless_dtype")
    assert [called(FP32, name, dtype, region=dtype) for dtype in (FP16, BF16)] == [WIDE, WIDE]


@pytest.mark.parametrize("name", "softmax.int log_softmax.int cumsum cumprod prod.dim_int sum.dim_IntList".split())
def test_a_dtype_that_is_given_counts(name: str, called: Callable[..., torch.dtype]) -> None:
    assert treatment(f"aten.{name}") == "fp32_unless_dtype"
    assert [called(FP32, name, dtype, dtype=FP16) for dtype in (FP16, WIDE)] == [FP16, FP16]


@pytest.mark.parametrize("name", PROMOTE)
def test_autocast_promotes(name: str, called: Callable[..., torch.dtype]) -> None:
    assert treatment(f"aten.{name}") == "promote"
    pairs = {(FP16, WIDE): WIDE, (WIDE, FP16): WIDE, (FP16, FP16): FP16}
    assert {pair: called(PROMOTE, name, *pair) for pair in pairs} == pairs


@pytest.mark.parametrize("name", NONE)
def test_autocast_leaves_alone(name: str, called: Callable[..., torch.dtype]) -> None:
    assert treatment(f"aten.{name}") == "none"
    assert all(called(NONE, name, dtype) is dtype for dtype in (FP16, BF16, WIDE))


def composites() -> list[str]:
    """Operations made of others, which the graph keeps whole: autocast treats their parts."""
    every = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return sorted(
        name
        for name in every
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")
        and not name.endswith(("out", "backward"))
        and not name.partition(".")[0].endswith("_")
    )


def plausible_arguments(t: Make) -> list[tuple[Any, ...]]:
    x, v = t(4, 4), t(4)
    whole = torch.zeros(4, dtype=torch.int64, device="cuda")
    return [
        *((x,), (x, x), (x, x, x), (v, v), (x, 1), (x, 2.0), (x, [1]), (x, v), ([x, x],), (v, x), (x, whole)),
        *((t(2, 4, 4), t(2, 4, 4)), (t(1, 4, 8, 8),), (t(1, 4, 8, 8), [2, 2]), (x, [0, 1]), (x, 2, 1), (x, -1, None)),
    ]


def attempt(name: str, args: tuple[Any, ...], enabled: bool) -> torch.dtype | None:
    """Dtype of the result with autocast on or off; None where the operation refuses the arguments."""
    torch.set_autocast_enabled("cuda", enabled)
    try:
        return first_dtype(overload(name)(*args))
    except Exception:
        return None


def mistakes(t: Make) -> tuple[int, list[str]]:
    """How many operations took some of the arguments, and those of them where the policy predicts another dtype."""
    tried, wrong = 0, []
    for name in composites():
        for args in plausible_arguments(t):
            actual = attempt(name, args, enabled=True)
            if actual is not None:
                tried += 1
                op = name if "." in name else f"{name}.default"
                expected = attempt(name, autocast_arguments(f"aten.{op}", args, {}, FORMATS["fp16"])[0], enabled=False)
                if expected is not actual:
                    wrong.append(f"{name}: {actual}, where the policy says {expected}")
                break
    return tried, wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", thinned([WIDE, FP16]))
def test_composites_behave_as_their_parts(dtype: torch.dtype) -> None:
    with autocast(FP16):
        tried, wrong = mistakes(lambda *shape: torch.empty(*shape, dtype=dtype, device="cuda"))
    assert tried > 200
    assert not wrong, "\n".join(["add to [cuda.composites] of auditor/numerics/autocast.toml:", *wrong])


# The one table of operations: complete for the architectures of the tests, true to torch's schemas, a row per operation.

PYTHONS = {"getitem", "to_device"}
"""Rows of what is no operation of torch."""

OLDER = {"rename", "shallow_copy_data"}
"""Operations that some releases have."""

THEMSELVES = {
    *("contiguous", "coalesce", "pin_memory", "positive", "resolve_conj", "resolve_neg", "to"),
    *("_autocast_to_full_precision", "_autocast_to_reduced_precision"),
}
"""Operations that return their argument where there is nothing to do, and something new where there is."""

INSIDES = {
    *("indices", "values", "_indices", "_values", "crow_indices", "ccol_indices", "col_indices", "row_indices"),
    *("_sparse_broadcast_to", "_nested_get_values", "_nested_view_from_buffer", "_nested_view_from_jagged"),
    *("_fw_primal", "_make_dual", "_unpack_dual", "slice_inverse", "_test_autograd_multiple_dispatch_view"),
}
"""Parts of sparse, nested and dual tensors, and torch's own means of writing to views."""

UNSAID = {
    *("getitem", "_unsafe_view", "broadcast_tensors"),
    *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
}
"""Views whose schema does not say so."""


def names_of_torch() -> set[str]:
    """Packets as the table writes them."""
    every = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return {packet(name.replace("::", ".")) for name in every}


def aliasing() -> set[str]:
    """Packets of ATen one of whose overloads returns a view, by its schema, and writes nothing."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base.removeprefix("aten::"), None), overload or "default", None)
        if not name.startswith("aten::") or op is None or op._schema.is_mutable:
            continue
        if any(value.alias_info is not None for value in op._schema.returns):
            found.add(packet(f"aten.{base.removeprefix('aten::')}"))
    return found


@pytest.mark.parametrize("name", thinned(ZOO))
def test_the_table_knows_what_an_architecture_uses(name: str) -> None:
    subject = specimen(name)
    used = {node.op for node in capture_of(subject.model, *subject.args, **subject.kwargs).nodes.values()}
    unknown = sorted(op for op in used if not operation(op).known)
    assert used
    assert not unknown, f"auditor/numerics/operations.toml has no row for {', '.join(unknown)}: what are they?"


def test_every_row_is_an_operation_of_torch() -> None:
    names = names_of_torch()
    missing = {name for name in packets() if name not in names and f"{name}_" not in names}
    assert missing - OLDER == PYTHONS


def test_no_row_stands_twice() -> None:
    held = table("numerics/operations")
    counts = Counter([*held["plain"], *held["operations"]])
    assert [name for name, count in counts.items() if count > 1] == []


def test_views_are_those_of_torchs_schemas() -> None:
    views = {name for name in packets() if operation(name).view}
    unlisted = {name for name in aliasing() if not operation(name).view}
    assert sorted(unlisted - THEMSELVES - INSIDES) == []
    assert sorted(views - aliasing()) == sorted(UNSAID)


def test_rows_name_operations_and_formulas_that_there_are() -> None:
    for row in map(operation, packets()):
        assert row.flops in {"", *FORMULAS}, row.packet
        for other in (row.inverse, row.scatter, row.complement, row.twin):
            assert not other or hasattr(torch.ops.aten, other), (row.packet, other)
        if row.known_as:
            ours, theirs = overload_named(f"aten.{row.packet}.default"), overload_named(row.known_as)
            assert [a.type for a in ours._schema.arguments[:2]] == [a.type for a in theirs._schema.arguments[:2]]


def test_names_as_messages_write_them() -> None:
    ops = ("aten.linalg_svd.default", "aten.add_.Tensor", "_c10d_functional.wait_tensor.default", "getitem")
    assert [operation(op).name for op in ops] == ["linalg_svd", "add_", "wait_tensor", "getitem"]


def test_variants_share_a_row() -> None:
    assert operation("aten.add_.Tensor").sum
    assert operation("aten.add.out").sum
    assert operation("prims.add.default").sum
    assert operation("aten.__and__.Tensor").packet == "__and__"  # not the in-place variant of anything


def test_a_copy_of_a_view_is_no_view() -> None:
    view, copy = operation("aten.select.int"), operation("aten.select_copy.int")
    assert (view.entries, view.view, view.scatter) == ("moved", "always", "select_scatter")
    assert (copy.entries, copy.view, copy.scatter) == ("moved", "", "")
    assert operation("aten.index_copy.default").entries == ""  # `index` is no view, so this is something else


def test_what_the_table_does_not_know_is_nothing_in_particular() -> None:
    row = operation("elsewhere.linear.default")
    assert (row.packet, row.name, row.known) == ("elsewhere.linear", "linear", False)
    assert row == Operation(op="elsewhere.linear.default", packet="elsewhere.linear")


def test_columns_say_words_that_they_know() -> None:
    hints = get_type_hints(Operation)
    for row in map(operation, packets()):
        assert [
            name
            for name in hints
            if get_origin(hints[name]) is Literal and getattr(row, name) not in get_args(hints[name])
        ] == []
