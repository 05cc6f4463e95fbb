"""What no page may say: that a model has to stay in FP32, where a run in low precision was within every limit."""

from __future__ import annotations

import html
import re

from auditor.plan.recommend import outcome
from auditor.records import Audit
from auditor.reporters import REPORTERS

FORBIDDEN = ("keep the model in fp32", "train in fp32")
REACHABLE = re.compile(r"smallest reachable error is ([0-9.e+-]*[0-9])")


def is_low_within_limits(audit: Audit) -> bool:
    """Whether any run with something in low precision was within every limit of the audit."""
    if any(plan.holds and (plan.has_low or plan.program is not None) for plan in audit.plans.values()):
        return True
    scored = any(plan.score is not None or plan.generated is not None for plan in audit.plans.values())
    return not scored and any(run.holds for run in audit.baselines.values())


def assert_no_false_fp32(audit: Audit) -> None:
    """No reporter's page says FP32 where low precision is within the limits, or names a reachable error within them."""
    pages = {name: " ".join(html.unescape(make(audit)).split()) for name, make in REPORTERS.items()}
    for name, page in pages.items():
        if is_low_within_limits(audit):
            said = [words for words in FORBIDDEN if words in page.lower()]
            assert not said, f"{name}: {said}, although {outcome(audit.plans, audit.use)}"
        for error in REACHABLE.findall(page):
            assert float(error) > audit.max_error, f"{name}: {error} is named as too large"
