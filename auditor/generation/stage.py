"""The generation stage of an audit: FP32 generates the tokens that become inputs, and plans are compared on them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ..criteria import criteria_of
from ..criteria.margins import margins_of
from ..criteria.measure import Criteria, names_of
from ..folder import OWN
from ..isolation.answer import answer
from ..plan.workbench import Workbench
from ..records import Batch, Plan, Subject
from ..records.generation import Generation, StoredCache
from ..settings import Settings
from ..stages import Stages
from ..verify import Runs
from .compare import Decoding, ReferenceTokens, expected_flips, figures, stored_caches
from .decode import cannot_generate, prompts_of
from .parts import shares


@dataclass(frozen=True)
class GenerationReference:
    """FP32's tokens for the calibration inputs, and for held-out inputs if there are any. folder: for their logits.

    caches: how the FP32 model does with its cache in fewer bits.
    """

    folder: tempfile.TemporaryDirectory[str]
    decoding: Decoding
    batches: Sequence[ReferenceTokens]
    held_out: Sequence[ReferenceTokens]
    caches: tuple[StoredCache, ...]

    @property
    def checks(self) -> Sequence[ReferenceTokens]:
        """The batches on which plans decode."""
        return self.held_out or self.batches

    @property
    def reference(self) -> Generation:
        """The record of the tokens that FP32 generated."""
        texts, counted = sum(len(one.tokens) for one in self.checks), sum(int(one.counts.sum()) for one in self.checks)
        return Generation(texts, self.decoding.steps, counted, self.decoding.temperature, caches=self.caches)

    def under(self, plans: Mapping[str, Plan], bench: Workbench) -> dict[str, Plan]:
        """Attach decoding results to every plan that meets the error budget."""
        wanted = {name: plan for name, plan in plans.items() if plan.is_verified and plan.program is None}
        question = partial(Runs.generate, compare=partial(self.decoding.compare, batches=self.checks))
        with self.folder:
            given = bench.ask(wanted, question) if wanted else {}
        return {name: self._with(bench, plan, given[name]) if name in given else plan for name, plan in plans.items()}

    def _with(self, bench: Workbench, plan: Plan, given: dict[str, list[torch.Tensor]] | str) -> Plan:
        distance = bench.yardstick.distance
        reference = bench.reference(bench.checks[0])
        decided = distance.each if isinstance(distance, Criteria) else ()
        known = [margins_of(one, reference[0]) for one in decided if one.kind == "top1"]
        margins = next((one for one in known if one is not None), None)

        def flips(error: float) -> float | None:
            return None if margins is None else expected_flips(self.checks, error * margins.allowed_change)

        predicted, parts = shares(bench.problem(plan.strategy, plan.format), plan, flips)
        found = figures(self.checks, given)
        return replace(plan, generated=replace(found, predicted_flips=flips(predicted), parts=parts))


def generate_reference(
    subject: Subject, options: Settings, stages: Stages
) -> tuple[Subject, Settings, GenerationReference | None]:
    """The subject with FP32's generated tokens appended to its prompts, and a default criterion `top1` on them;
    unchanged if no tokens are requested.

    Raises: LoadError(slug="cannot-generate").
    """
    if options.generate is None:
        return subject, options, None
    folder = tempfile.TemporaryDirectory(prefix=OWN, ignore_cleanup_errors=True)
    decoding, model = Decoding(options.generate, options.temperature, options.seed), subject.model

    def each(batches: Sequence[Batch], name: str) -> list[ReferenceTokens]:
        files = [Path(folder.name, f"{name}{index}.pt") for index in range(len(batches))]
        prompts = [prompts_of(model, batch) for batch in batches]
        return [decoding.reference(model, *one, nullcontext) for one in zip(prompts, files, strict=True)]

    with stages("generate", f"{options.generate} tokens in FP32"):
        batches, held_out = each(subject.batches, "batch"), each(subject.held_out, "held_out")
        caches = stored_caches(decoding, model, held_out or batches, nullcontext)
        forced, others = (tuple(one.prompts.forced_inputs(model, one.tokens) for one in x) for x in (batches, held_out))
        subject = replace(subject, batches=forced, held_out=others)
        outputs = answer(model, subject.batches[0], seed=options.seed)
    names = names_of(outputs)
    if not names or outputs[0].dim() != 3:
        raise cannot_generate(f"the first output of {subject.name} must be logits [prompts, tokens, vocabulary]")
    if not options.limits and options.metric is None:
        options = options.with_values(limits=tuple(criteria_of(f"{names[0]}: top1 >= {1 - options.max_error:.12g}")))
    return subject, options, GenerationReference(folder, decoding, batches, held_out, caches)
