from types import SimpleNamespace

from auditor.plan.answered import _by_format


def test_plans_of_one_format_are_run_one_after_the_other():
    plans = {name: SimpleNamespace(format=name.split("_")[1]) for name in ("a_fp16", "a_bf16", "b_fp16", "b_bf16")}
    assert _by_format(plans) == ["a_fp16", "b_fp16", "a_bf16", "b_bf16"]
