"""What runs with operations low say: which of them decide, why they err, and what they do together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.measure.attribute import first_order
from auditor.measure.causes import breaks, cause_of, deciding_nodes, guarding_nodes, refine_causes
from auditor.measure.rerun import MAX_REGIONS, PLAIN, OutputMetric, Reruns, chooses_otherwise, of_verdicts, regions_of
from auditor.numerics.formats import FORMATS
from auditor.numerics.histogram import Deviation, Profile
from auditor.numerics.metrics import relative_l2
from auditor.records import Capture, Contribution, FlaggedRegion, NodeError, Verdict
from tests.support.capturing import Function
from tests.support.subjects import capture_of, effects_of, measurement_of, nodes_by_op, normal


def test_what_raises_is_an_infinite_error() -> None:
    measured = measurement_of(Function(lambda x: (x * 3.0) @ x), torch.eye(2))
    assert Reruns(measured, "bf16", PLAIN).error("mul", torch.ones(3, 3)) == math.inf


@pytest.mark.parametrize(("value", "expected", "operations"), [(torch.inf, 1.0, 1), (0.5, 0.5, 3)])
def test_a_change_is_followed_until_something_absorbs_it(value: float, expected: float, operations: int) -> None:
    measured = measurement_of(Function(lambda x: (x * 3).clamp(max=1.0).exp().sin()), torch.tensor([5.0]))
    reruns, was, now = Reruns(measured, "bf16", PLAIN), math.sin(math.e), math.sin(math.exp(expected))
    assert reruns.error("mul", torch.tensor([value])) == pytest.approx(abs(now / was - 1), rel=1e-5)
    assert reruns.spent == operations / 4


@pytest.mark.parametrize(
    ("function", "now", "expected"),
    [
        (lambda x: x.argmax(-1), [[0.9, 0.2]], True),
        (lambda x: x.argmax(-1), [[0.3, 0.9]], False),
        (lambda x: x > 0.5, [[0.2, 0.4]], True),
        (lambda x: x.topk(1), [[0.9, 0.2]], True),
        (lambda x: x.round(), [[0.6, 0.9]], True),
        (lambda x: x.sign(), [[-0.1, 0.9]], True),
        (lambda x: x.isfinite(), [[torch.inf, 0.9]], False),
        (lambda x: x.exp(), [[0.9, 0.2]], False),
    ],
)
def test_what_is_another_choice(function: Callable[..., Any], now: list[list[float]], expected: bool) -> None:
    x = torch.tensor([[0.2, 0.9]])
    graph = capture_of(Function(lambda x: (function(x), x * 2.0)), x).graph_module.graph
    node = next(node for node in graph.nodes if node.op == "call_function")
    assert chooses_otherwise(node, function(torch.tensor(now)), {node.name: function(x)}) == expected


def test_the_users_own_measure_is_asked_and_its_unit_taken_off() -> None:
    def largest(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
        return max(float((r - c).abs().max()) for r, c in zip(reference, low, strict=True))

    measured = measurement_of(Function(lambda x: (x * 3.0) + 1.0), torch.tensor([[1.0, 2.0]]))
    output_metric = OutputMetric(0.5, largest, unit=10.0)
    assert output_metric.limit == 0.05
    off = Reruns(measured, "bf16", output_metric).error("mul", torch.tensor([[3.0, 6.5]]))
    assert off == pytest.approx(0.5 / 10.0)
    assert output_metric([torch.ones(2)], [torch.tensor([1.0, torch.inf])]) == (math.inf, "")


# Causes of small, constructed errors, each name argued beside it.

FP16, BF16 = FORMATS["fp16"], FORMATS["bf16"]
UNHURT = Deviation()
ONES = torch.ones(4)


def cause(
    op: str,
    error: float,
    hurt: Deviation = UNHURT,
    result: Tensor = ONES,
    inputs: tuple[Tensor, ...] = (ONES,),
    divisor: Profile | None = None,
    divides: bool = False,
) -> str | None:
    low = replace(hurt, error=error)
    return cause_of(op, low, FP16, Profile(result), [Profile(x) for x in inputs], divisor, divides)


def test_non_finite_results_come_first() -> None:
    assert cause("mul", float("inf"), Deviation(overflow=1, nan=1, underflow=0.5)) == "overflow"
    assert cause("sub", float("inf"), Deviation(nan=1, underflow=0.5)) == "nan"


def test_an_exact_result_has_no_cause() -> None:
    assert cause("mul", 0.0) is None
    assert cause("mul", 0.0, Deviation(subnormal=1.0)) is None  # subnormal, yet exact


def test_underflow_needs_a_share_of_the_entries_and_an_error_beyond_rounding() -> None:
    flushed, tiny = Deviation(underflow=0.01), ONES * 1e-9  # half of fp16's smallest number is 3e-8
    assert cause("mul", 0.1, flushed, tiny) == "underflow"
    assert cause("mul", 0.1, Deviation(underflow=0.0099), tiny) == "rounding"
    assert cause("mul", 2.0**-10, flushed, tiny) == "rounding"  # epsilon of fp16: the flushed entries weigh nothing


def test_an_input_beyond_the_range_turns_a_single_entry_into_zero() -> None:
    hub = torch.tensor([70_000.0, 4.0, 9.0])  # counts, of which 70,000 is Inf in FP16
    lost = Deviation(underflow=1 / 4000)
    assert cause("pow", 0.003, lost, hub**-0.5, inputs=(hub,)) == "overflow"
    assert cause("pow", 0.003, UNHURT, hub**-0.5, inputs=(hub,)) == "rounding"
    assert cause("pow", 0.003, lost, hub**-2.0, inputs=(hub,)) == "rounding"  # 70,000 ** -2 is too small for FP16
    assert cause("pow", 0.003, lost, ONES / 2, inputs=(ONES * 4,)) == "rounding"


@pytest.mark.parametrize("hurt", [Deviation(overflow=1), Deviation(nan=1)])
def test_a_divisor_that_vanishes_is_no_overflow(hurt: Deviation) -> None:
    vanished, held = (Profile(ONES * size) for size in (2e-8, 6e-8))  # FP16's smallest number is 6e-8
    assert cause("log", float("inf"), hurt, divisor=vanished) == "underflow"
    assert cause("log", float("inf"), hurt, divisor=held) == ("overflow" if hurt.overflow else "nan")
    beyond = ONES * 1e5  # FP16 ends at 65504: what does not fit would not fit whatever it is divided by
    assert cause("div", float("inf"), hurt, beyond, divisor=vanished) == ("overflow" if hurt.overflow else "nan")


def test_few_bits_of_what_something_divides_by_are_underflow() -> None:
    subnormal = Profile(ONES * 3e-7)
    assert cause("log", 0.002, divisor=subnormal) == "underflow"  # above 2^-10, which rounding does not reach
    assert cause("log", 2.0**-11, divisor=subnormal) == "rounding"
    assert cause("add", 1e-6, Deviation(underflow=0.001), divides=True) == "underflow"
    assert cause("add", 1e-6, Deviation(subnormal=0.01), divides=True) == "underflow"
    assert cause("add", 1e-6, Deviation(subnormal=0.01)) == "rounding"


def test_what_vanishes_and_turns_the_outputs_non_finite_later_is_underflow() -> None:
    ends, stays = (Contribution(size, 0.1, 0.0) for size in (float("inf"), 0.5))

    def after(error: NodeError, effect: Contribution) -> str | None:
        return refine_causes({"x": {"fp16": error}}, {"x": {"fp16": effect}})["x"]["fp16"].cause

    assert after(NodeError(underflow=0.001, cause="rounding"), ends) == "underflow"
    assert after(NodeError(underflow=0.001, cause="rounding"), stays) == "rounding"
    assert after(NodeError(cause="rounding"), ends) == "rounding"
    assert after(NodeError(underflow=0.001, overflow=3, cause="overflow"), ends) == "overflow"
    assert after(NodeError(underflow=0.001, cause="cancellation"), ends) == "cancellation"


@pytest.mark.parametrize("op", ["sub", "rsub", "add", "sum", "mean", "var"])
def test_cancellation_in_a_sum(op: str) -> None:
    # operands of 1, a result of 0.1: ten times smaller, and an error above 8 * 2^-11 = 0.0039
    assert cause(op, 0.004, result=ONES / 10) == "cancellation"
    assert cause(op, 0.0039, result=ONES / 10) == "rounding"
    assert cause(op, 0.004, result=ONES / 8) == "rounding"  # eight times smaller is not more than eight


def test_what_does_not_cancel() -> None:
    assert cause("mul", 0.004, result=ONES / 10) == "rounding"  # a product
    assert cause("add", 0.004, result=ONES / 10, inputs=(torch.empty(0),)) == "rounding"
    assert cause("add", 0.004, inputs=()) == "rounding"


def test_cancellation_depends_on_the_format() -> None:
    # 8 * 2^-8 = 0.03125
    assert cause_of("sub", Deviation(error=0.03), BF16, Profile(ONES / 10), [Profile(ONES)]) == "rounding"
    assert cause_of("sub", Deviation(error=0.032), BF16, Profile(ONES / 10), [Profile(ONES)]) == "cancellation"


def test_a_break_is_a_refusal_or_something_that_turns_non_finite() -> None:
    whole = Contribution(0.5, 0.5, 0.0)
    for broken in (NodeError(unsupported="no kernel"), NodeError(overflow=1), NodeError(nan=1)):
        assert breaks(broken, whole)
        assert breaks(broken, None)
    for moved in (float("inf"), float("nan")):
        assert breaks(NodeError(), Contribution(moved, 0.0, 0.0))
    assert not breaks(NodeError(local_error=3.0), whole)
    assert not breaks(NodeError(), None)


# Which values decide a discrete result, or stand under an operation that is singular at zero, on small graphs by name.


def decide(function: object, *inputs: Tensor) -> set[str]:
    return deciding_nodes(capture_of(Function(function), *inputs))


X = torch.linspace(-1, 2, 6).reshape(2, 3)


def test_the_last_three_operations_before_a_choice() -> None:
    def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().cos().tanh().exp()  # four, of which the first is too far away
        return y.argmax(-1), x.sinh()

    assert decide(chosen, X) == {"cos", "tanh", "exp"}


def test_a_mask_decides_and_its_reader_does_not() -> None:
    assert decide(lambda x: (x.exp() > 1.0) * x.cos(), X) == {"exp"}


def test_without_a_floating_output_every_floating_value_decides() -> None:
    assert decide(lambda x: x.sin().cos().tanh().exp().argmax(-1), X) == {"sin", "cos", "tanh", "exp"}


def test_questions_about_shape_or_finiteness_are_no_choices() -> None:
    assert decide(lambda x: (torch.isnan(x.exp()), torch.ones_like(x.sin(), dtype=torch.long), x.tanh()), X) == set()


def test_two_choices_reach_back_each_by_its_own_way() -> None:
    def routed(x: Tensor) -> Tensor:
        first = x.exp().argmax(-1, keepdim=True)
        return x.cos().gather(-1, first).floor().long() + x.tanh()

    assert decide(routed, X) == {"exp", "cos", "gather", "floor"}


Y = torch.linspace(1, 2, 4).reshape(2, 2)


@pytest.mark.parametrize(
    "divided",
    [
        lambda x, g: x / g,
        lambda x, g: torch.true_divide(x, g),
        lambda x, g: x.fmod(g),
        lambda x, g: torch.atan2(x, g),
        lambda x, g: torch.addcdiv(x, x, g),
        lambda x, g: x * g.reciprocal(),
        lambda x, g: x * g.rsqrt(),
        lambda x, g: x * g.log(),
        lambda x, g: x * g**-2,
    ],
)
def test_what_stands_where_a_zero_changes_everything(divided: Callable[..., Tensor]) -> None:
    captured = capture_of(Function(lambda x: divided(x, x.sinh())), Y)
    assert guarding_nodes(captured) & captured.nodes.keys() == {"sinh"}


@pytest.mark.parametrize(
    "harmless", [lambda x, g: g / x.exp(), lambda x, g: g**2 * x, lambda x, g: g**0 * x, lambda x, g: g.exp() * x]
)
def test_numerators_and_powers_are_no_guards(harmless: Callable[..., Tensor]) -> None:
    captured = capture_of(Function(lambda x: harmless(x, x.sinh())), Y)
    assert "sinh" not in guarding_nodes(captured)


def test_a_row_that_vanishes_as_a_whole_is_run() -> None:
    x = torch.linspace(1, 2, 64).repeat(4, 1)
    x[0] *= 1e-5
    measured = measurement_of(Function(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))), x)
    found = effects_of(measured)["pow_1"]["fp16"]
    assert found.decided_by == "re-run"
    assert not found.isolated < 1


# Regions: flagged nodes that read each other, run low together and held against what they explain one by one.


def regions(model: nn.Module, *args: Tensor, flagged: Callable[[Capture], set[str]], fmt: str) -> Any:
    measured = measurement_of(model, *args)
    chosen = flagged(measured.capture)
    contributions = {
        name: {f: replace(one, isolated=float(f == fmt and name in chosen)) for f, one in by_format.items()}
        for name, by_format in first_order(measured).contributions.items()
    }
    return tuple(regions_of(measured, contributions, OutputMetric(0.01)))


def named(*packets: str) -> Callable[[Capture], set[str]]:
    return lambda capture: {node.name for packet in packets for node in nodes_by_op(capture, packet)}


@pytest.mark.parametrize(("fmt", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_region_is_low_inside_and_fp32_outside(fmt: str, dtype: torch.dtype) -> None:
    x = normal(4, 8)
    model = Function(lambda x: ((x * 3.0).exp() / 7.0).sin())
    (region,) = regions(model, x, flagged=named("mul", "exp"), fmt=fmt)
    inside = (x.to(dtype) * 3.0).exp().float()
    assert (region.format, len(region.nodes), region.failure) == (fmt, 2, None)
    assert region.local_error == pytest.approx(relative_l2((x * 3.0).exp(), inside))
    assert region.error == pytest.approx(relative_l2(model(x), (inside / 7.0).sin()))


def test_errors_that_cancel_show() -> None:
    # Both quotients are rounded alike, so their difference has no error, though each alone moves the result.
    model = Function(lambda x: (x / 3.0 - x / 3.0) + x * 0.25)
    (region,) = regions(model, normal(4, 8), flagged=named("div", "sub"), fmt="bf16")
    assert len(region.nodes) == 3
    assert region.error == 0.0
    assert region.explained > 1e-3


def test_errors_that_reinforce_each_other_show() -> None:
    model = Function(lambda x: x / 3.0 + x / 3.0)
    (region,) = regions(model, normal(64, 64), flagged=named("div", "add"), fmt="fp16")
    # The same error twice is 2 of one, not sqrt 2; the sum's own rounding, exact here, adds nothing.
    assert region.error / region.explained == pytest.approx(math.sqrt(2), rel=0.25)


def test_views_between_flagged_nodes_belong_to_the_region() -> None:
    model = Function(lambda x: (x * 3.0).reshape(8, 4).exp() + 1.0)
    (region,) = regions(model, normal(4, 8), flagged=named("mul", "exp"), fmt="fp16")
    assert len(region.nodes) == 3


@pytest.mark.parametrize(
    ("names", "scope"),
    [(("/conv1/Mul", "/conv2/Exp"), ""), (("net./conv1/Mul", "net.plain"), "net"), (("a", "a.inner"), "a")],
)
def test_a_region_lies_in_the_innermost_module_around_it_whatever_names_have(
    names: tuple[str, str], scope: str
) -> None:
    model = Function(lambda x: second(first(x)))
    first, second = Function(lambda x: x * 3.0), Function(lambda x: x.exp())
    for path, part in zip(names, (first, second), strict=True):
        *parents, last = path.split(".")
        holder: nn.Module = model
        for parent in parents:
            if not hasattr(holder, parent):
                holder.add_module(parent, nn.Module())
            holder = getattr(holder, parent)
        holder.add_module(last, part)
    (region,) = regions(model, normal(4, 8), flagged=named("mul", "exp"), fmt="fp16")
    assert region.scope == scope


def test_a_region_that_turns_non_finite_says_so() -> None:
    model = Function(lambda x: (x * 1e4) / 1e4 + x)
    (region,) = regions(model, normal(4, 8) * 100, flagged=named("mul", "div"), fmt="fp16")
    assert region.local_error == region.error == math.inf


RAISED: list[Exception] = []


@torch.library.custom_op("refusing::refuses", mutates_args=())
def refuses(x: Tensor) -> Tensor:
    if RAISED:
        raise RAISED.pop()
    return x.exp()


def test_a_region_that_cannot_run_says_why_but_for_want_of_memory() -> None:
    reruns = Reruns(measurement_of(Function(lambda x: refuses(x * 3.0)), normal(4)), "fp16", PLAIN)
    RAISED.append(AssertionError("in a word"))
    local, error, failure = reruns.region(["mul", "refuses"])
    assert (local, error) == (None, None) and "in a word" in str(failure)
    RAISED.append(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        reruns.region(["mul", "refuses"])


def test_only_the_regions_that_take_most_are_run() -> None:
    def pairs(x: Tensor) -> Tensor:
        return sum(((x * (1.1 + i)).exp() * 2.0**-i) @ torch.eye(8) for i in range(MAX_REGIONS + 2))

    result: tuple[FlaggedRegion, ...] = regions(Function(pairs), normal(4, 8), flagged=named("exp", "mul"), fmt="bf16")
    assert len(result) == MAX_REGIONS
    refine_causes = [region.explained for region in result]
    assert refine_causes == sorted(refine_causes, reverse=True)


def test_only_what_is_judged_to_do_harm_is_told_and_once() -> None:
    model, x = Function(lambda x: (x * 3.0).exp()), normal(4, 8)
    found, captured = regions(model, x, flagged=named("mul", "exp"), fmt="fp16"), capture_of(model, x)

    def told(**harm: Any) -> tuple[FlaggedRegion, ...]:
        verdicts = {name: {"fp16": Verdict(harm.get(name, "safe"), "said so")} for name in captured.nodes}
        return of_verdicts((*found, *found), captured, verdicts)

    assert told(mul="unsafe", exp="sensitive") == found
    assert told(mul="unsafe") == ()
