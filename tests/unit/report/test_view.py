from dataclasses import replace
from pathlib import Path

import pytest

from auditor.errors import AuditorError
from auditor.records import NodeError, Verdict, Verification
from auditor.report.view import view
from tests.unit.report.factory import make_audit


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "verified"),
        ({"measured_error": None, "verification": None}, "not run"),
        ({"measured_error": 0.02}, "over budget"),
        ({"measured_error": float("nan")}, "non-finite"),
        ({"verified": False}, "not verified"),
        ({"verification": Verification(None, False, "audited", "native", "KeyError: x")}, "failed"),
        ({"verification": Verification(0.001, False, "audited", "native")}, "non-finite"),
        ({"verification": Verification(0.001, True, "audited", "native", with_gradients=0.02)}, "over budget"),
    ],
)
def test_plan_verdicts(change, verdict):
    audit = make_audit()
    plans = {**audit.plans, "autocast_fp16": replace(audit.plans["autocast_fp16"], **change)}
    chosen = view(replace(audit, plans=plans)).chosen
    assert chosen.verdict == verdict


@pytest.mark.parametrize(("what", "name"), [("format", "e6m9"), ("strategy", "frugal")])
def test_an_audit_of_what_is_no_longer_registered_says_so(what: str, name: str, tmp_path: Path) -> None:
    audit = make_audit()
    if what == "format":
        gone = replace(audit, formats=(*audit.formats, name))
    else:
        first = next(iter(audit.plans.values()))
        gone = replace(audit, plans={**audit.plans, f"{name}_fp16": replace(first, strategy=name)})
    for shown in (gone._repr_html_, lambda: gone.save(tmp_path / "saved")):
        with pytest.raises(AuditorError, match=f"the {what} '{name}' of this audit is no longer registered") as caught:
            shown()
        assert caught.value.slug == f"bad-{what}"
    assert not (tmp_path / "saved").exists()


def test_cautions_are_sentences() -> None:
    audit = make_audit(20)
    cautioned = replace(audit, warnings=("the model is stored in bfloat16: the reference is the same values in FP32",))
    assert "The model is stored in bfloat16: the reference is the same values in FP32." in view(cautioned).limits
    assert all(limit[0].isupper() and limit.endswith(".") for limit in view(cautioned).limits)


def test_what_was_not_tested_is_not_said_to_be_neither() -> None:
    audit = make_audit(20, formats=("bf16",))
    safe, untested = Verdict("safe", ""), Verdict("untested", "it computes in float64")
    for number, words in (
        (0, "BF16: none of the 20 operations is unsafe or sensitive."),
        (1, "BF16: none of the 19 operations tested is unsafe or sensitive; 1 was not tested."),
        (3, "BF16: none of the 17 operations tested is unsafe or sensitive; 3 were not tested."),
        (20, "BF16 was not tested on any operation."),
    ):
        verdicts = [untested] * number + [safe] * (20 - number)
        nodes = tuple(replace(n, verdicts={"bf16": v}) for n, v in zip(audit.nodes, verdicts, strict=True))
        assert view(replace(audit, nodes=nodes)).contrast == (words,)


def test_what_limits_a_format_names_missing_kernels_beside_precision() -> None:
    audit = make_audit(20, formats=("bf16",))
    first, second, *others = audit.nodes
    rounded = replace(first, verdicts={"bf16": Verdict("sensitive", "alone it takes half", "precision")})
    missing = replace(
        second,
        verdicts={"bf16": Verdict("unsafe", "no kernel")},
        errors={"bf16": NodeError(unsupported="stft has no bfloat16 kernel")},
        exposed={"bf16": ("cast",)},
    )
    safe = [replace(node, verdicts={"bf16": Verdict("safe", "")}) for node in others]
    mixed = replace(missing, errors={"bf16": NodeError(unsupported="bmm got float32 and bfloat16 together")})
    for nodes, limit in (
        ((mixed, *safe), "operations that raise"),
        ((missing, *safe), "missing kernels"),
        ((rounded, missing, *safe), "precision and missing kernels"),
    ):
        seen = view(replace(audit, nodes=nodes))
        assert seen.tallies[0].limit == limit
        assert any(
            f"1 unsafe (only with cast weights) and {len(nodes) - len(safe) - 1} sensitive" in said
            for said in seen.contrast
        )
