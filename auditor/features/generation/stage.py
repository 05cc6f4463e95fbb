"""The generation stage of an audit: FP32 generates tokens that become inputs, and plans are compared on these tokens,
with the share of every part of the model in the error."""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ...capture.paths import reach
from ...criteria import Criterion, criteria_of
from ...criteria.margins import Margins, margins_of
from ...criteria.measure import Criteria, names_of
from ...errors import AuditorError, describe, let_through
from ...execution.execute import Executor
from ...execution.policy import choice_from_scopes
from ...isolation.outputs import NamedTensors, tensor_outputs
from ...isolation.run_model import run_model
from ...measure.layers import QuantizedModel
from ...numerics.nodes import readers, row_of, tensors_in
from ...plan.context import PlanningContext
from ...plan.made import MadePlans
from ...plan.problem import Problem
from ...records import Batch, Capture, Plan, Subject
from ...records.folder import OWN
from ...records.generation import Generation, PartShare, StoredCache
from ...records.quantization import QuantizedPlan
from ...settings import Settings
from ...stages import Stages
from ...verify.running import ModelRuns, failure_of
from ..feature import Feature, Followed
from .compare import Decoding, ReferenceTokens, expected_flips, figures, recommend_cache, scaled_caches, stored_caches
from .decode import Prompts, cannot_generate, prompts_of
from .layers import plan_cache


@dataclass(frozen=True)
class GenerationReference:
    """FP32's tokens for the calibration inputs, and for held-out inputs if given. folder: for files with the logits.

    caches, scaled: comparisons of stored caches, and of those with other scales. limits: the criteria of the logits whose
    measure is kl or top1."""

    folder: tempfile.TemporaryDirectory[str]
    decoding: Decoding
    batches: Sequence[ReferenceTokens]
    held_out: Sequence[ReferenceTokens]
    caches: tuple[StoredCache, ...]
    scaled: tuple[StoredCache, ...]
    limits: tuple[Criterion, ...]

    @property
    def checks(self) -> Sequence[ReferenceTokens]:
        """The batches on which plans decode: the held-out batches or, without them, the calibration batches."""
        return self.held_out or self.batches

    def record(self, model: nn.Module, plan: Plan | None) -> Generation:
        """The record of the generation, with the recommended caches; the files of the logits are then deleted. model: the
        FP32 model; plan: the recommended plan."""
        beside = () if plan is None or plan.generated is None else (plan.generated,)
        every = (*self.caches, *self.scaled)
        with self.folder:
            layers = plan_cache(self.decoding, model, self.checks, nullcontext, every, self.limits, beside)
        return Generation(
            prompts=sum(len(one.tokens) for one in self.checks),
            steps=self.decoding.steps,
            tokens=sum(int(one.counts.sum()) for one in self.checks),
            temperature=self.decoding.temperature,
            caches=self.caches,
            recommended_cache=recommend_cache(self.caches, self.limits, *beside),
            scaled_caches=self.scaled,
            cache_plan=layers,
        )

    def under(self, plans: Mapping[str, Plan], planning: PlanningContext) -> dict[str, Plan]:
        """The plans, with decoding results for patched models that meet the error budget."""
        patched = {name: plan for name, plan in plans.items() if plan.is_verified and plan.program is None}
        if not patched:
            return {**plans}
        compare = partial(self.decoding.compare, batches=self.checks)
        answers = planning.ask(patched, partial(ModelRuns.generate, compare=compare))
        result = {**plans}
        for name, answer in answers.items():
            result[name] = self._with(planning, plans[name], answer)
        return result

    def under_scheme(self, plan: QuantizedPlan, model: QuantizedModel) -> QuantizedPlan:
        """A plan of quantization schemes, with its decoding results."""
        compared: dict[str, Any] | str
        try:
            compared = self.decoding.compare(model.model, self.checks, partial(model.under, plan.layers))
        except Exception as error:
            let_through(error)
            compared = failure_of(error)
        return replace(plan, generated=figures(self.checks, compared))

    def _with(self, planning: PlanningContext, plan: Plan, decoded: dict[str, list[torch.Tensor]] | str) -> Plan:
        """A plan with its decoding results and, if a criterion on the logits' choices exists, with predicted flips."""
        batch = planning.subject.batches[0]
        logits = planning.reference(batch)[0]
        problem = planning.problem(plan.strategy, plan.format)
        margins = _margins_of_choices(planning, logits)
        comparison = figures(self.checks, decoded)
        if margins is None:
            _, parts = shares(problem, plan)
            return replace(plan, generated=replace(comparison, parts=parts))
        path = planning.capture.first
        policy = problem.policy_for(choice_from_scopes(plan.scopes))
        with torch.no_grad():
            outputs = Executor(path.graph_module, policy).run(*path.bind(planning.subject.model, batch))
        sizes = margins.size_by_step(logits, tensor_outputs(outputs)[0], self.decoding.steps)

        def flips(error: float) -> tuple[float, int | None]:
            return expected_flips(self.checks, error * margins.allowed_change, sizes)

        predicted, parts = shares(problem, plan, lambda error: flips(error)[0])
        per_1000, first = flips(predicted)
        comparison = replace(comparison, predicted_flips=per_1000, predicted_first_flip=first, parts=parts)
        return replace(plan, generated=comparison)


def generate_reference(
    subject: Subject, options: Settings, stages: Stages
) -> tuple[Subject, Settings, GenerationReference]:
    """Append FP32's generated tokens to the subject's prompts, and add the default criterion `top1` for the logits.

    Raises: LoadError(slug="cannot-generate") if the model cannot generate from its inputs, or returns no logits.
    """
    assert options.generate is not None
    folder = tempfile.TemporaryDirectory(prefix=OWN, ignore_cleanup_errors=True)
    decoding = Decoding(options.generate, options.temperature, options.seed)
    model = subject.model

    def generate(batches: Sequence[Batch], name: str) -> list[ReferenceTokens]:
        """Generate from all batches, after all prompts were read."""
        prompts = [prompts_of(model, batch) for batch in batches]
        tokens = list[ReferenceTokens]()
        for index, prompt in enumerate(prompts):
            file = Path(folder.name, f"{name}{index}.pt")
            with _explain_failure(subject.name, prompt, decoding.steps):
                tokens.append(decoding.reference(model, prompt, file, nullcontext))
        return tokens

    def with_tokens(generated: Sequence[ReferenceTokens]) -> tuple[Batch, ...]:
        return tuple(tokens.prompts.forced_inputs(model, tokens.tokens) for tokens in generated)

    with stages("generate", f"{options.generate} tokens in FP32"):
        batches = generate(subject.batches, "batch")
        held_out = generate(subject.held_out, "held_out")
        checks = held_out or batches
        caches = stored_caches(decoding, model, checks, nullcontext)
        scaled: tuple[StoredCache, ...] = ()
        if caches:
            scaled = scaled_caches(decoding, model, checks, nullcontext)
        forced = with_tokens(batches)
        forced_held_out = with_tokens(held_out)
        subject = replace(subject, batches=forced, held_out=forced_held_out)
        outputs = run_model(model, subject.batches[0], seed=options.seed)
    logits = _name_of_logits(subject, outputs, batches[0])
    if not options.criteria and options.metric is None:
        default = tuple(criteria_of(f"{logits}: top1 >= {1 - options.max_error:.12g}"))
        options = options.model_copy(update={"criteria": default})
    limits = list[Criterion]()
    for criterion in options.criteria:
        if criterion.covers(logits) and criterion.measure_text in ("kl", "top1"):
            limits.append(criterion)
    reference = GenerationReference(folder, decoding, batches, held_out, caches, scaled, tuple(limits))
    return subject, options, reference


@contextmanager
def _explain_failure(name: str, prompts: Prompts, steps: int) -> Iterator[None]:
    """Raise an error of the model in the body, which decodes in FP32, as LoadError(slug="cannot-generate")."""
    try:
        yield
    except Exception as error:
        let_through(error)
        if isinstance(error, AuditorError):
            raise
        raise cannot_generate(
            f"{name} raised {describe(error)} in FP32, while it continued prompts of {prompts.ids.shape[1]} tokens by {steps}: "
            "if the model has fewer positions, give shorter prompts or a smaller number of tokens"
        ) from error


def _name_of_logits(subject: Subject, outputs: NamedTensors, generated: ReferenceTokens) -> str:
    """The name of the first output, which must be the logits that generated the tokens.

    Raises: LoadError(slug="cannot-generate").
    """
    vocabulary = torch.load(generated.logits, mmap=True).shape[-1]
    names = names_of(outputs)
    if not names or outputs[0].dim() != 3 or outputs[0].shape[-1] != vocabulary:
        raise cannot_generate(f"the first output of {subject.name} must be logits [prompts, tokens, {vocabulary}]")
    return names[0]


def _margins_of_choices(planning: PlanningContext, logits: torch.Tensor) -> Margins | None:
    """The margins of the most probable tokens, of the first criterion `top1` that has them; None without one."""
    distance = planning.output_metric.distance
    if not isinstance(distance, Criteria):
        return None
    for criterion in distance.each:
        if criterion.kind == "top1":
            margins = margins_of(criterion, logits)
            if margins is not None:
                return margins
    return None


class Generate(Feature):
    """Lets FP32 continue the prompts, and compares the tokens of every verified plan with FP32's."""

    _reference: GenerationReference

    @classmethod
    def wants(cls, options: Settings) -> bool:
        """Whether tokens are asked for."""
        return options.generate is not None

    def prepare(self, subject: Subject, options: Settings, stages: Stages) -> tuple[Subject, Settings]:
        """Append FP32's tokens to the prompts; see `generate_reference`."""
        subject, options, self._reference = generate_reference(subject, options, stages)
        return subject, options

    def after_plans(self, made: MadePlans, planning: PlanningContext, stages: Stages) -> MadePlans:
        """All plans, with the results of decoding under the verified ones."""
        reference, model = self._reference, made.quantized_model
        schemes = made.quantized_plans
        with stages("decode", "generate tokens under every verified plan"):
            if model is not None:
                schemes = tuple(reference.under_scheme(plan, model) for plan in schemes)
            plans = reference.under(made.plans, planning)
        return replace(made, plans=plans, quantized_plans=schemes)

    def fields(self, followed: Followed) -> dict[str, Any]:
        """The tokens, and the formats of the key-value cache."""
        with followed.stages("caches", "find the layers whose keys or values need more bits"):
            record = self._reference.record(followed.planning.subject.model, followed.plan)
        return {"generation": record}


FEATURE = Generate


def parts_of(capture: Capture) -> dict[str, str]:
    """{node or placeholder: its part of the model, such as `norms`}, by its row in the table of operations and by the
    operations that read its result; a weight belongs to the part of the last operation that reads the weight."""
    nodes = list(capture.graph_module.graph.nodes)
    rotary, angles = _rotary_nodes(capture)
    routed = _routing_nodes(nodes)
    cached = set[fx.Node]()
    for node in nodes:
        if row_of(node).attention:
            for source in node.all_input_nodes[1:3]:  # keys and values
                cached.update(_through(source))
    output = next((n for n in nodes if n.name == capture.outputs[0]), nodes[-1])
    head = set(_through(output))
    result = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        row = row_of(node)
        owner = capture.nodes.get(node.name)
        parts = {
            "head": node in head,
            "router": node in routed,
            "keys and values": node in cached,
            "norms": row.normalizes or (owner is not None and "norm" in owner.owner_type.lower()),
            "softmax and attention": row.attention or row.distribution,
            "linear layers": (row.product or row.embedding or row.recurrent) and node not in angles,
            "rotary tables": node in rotary or node in angles,
            "residual sums": row.sum,
        }
        result[node.name] = next((part for part, is_one in parts.items() if is_one), "activations and the rest")
    for node in nodes:
        if node.name not in result:
            last_readers = reversed([*readers(node)])
            result[node.name] = next((result[one.name] for one in last_readers), "unread")
    return result


def _rotary_nodes(capture: Capture) -> tuple[set[fx.Node], set[fx.Node]]:
    """Operations of rotary embeddings: from the sines and cosines on, up to the next product; and those that compute the
    angles, from positions alone."""
    varying = {placeholder.name for placeholder in capture.placeholders if placeholder.kind in ("input", "parameter")}
    rotary = set[fx.Node]()
    angles = set[fx.Node]()
    for node in capture.graph_module.graph.nodes:
        row = row_of(node)
        continues = not (row.product or row.attention) and not rotary.isdisjoint(node.all_input_nodes)
        if row.wave or continues:
            rotary.add(node)
        if row.wave and node not in angles:
            upstream = reach([node], lambda at: at.all_input_nodes)
            given = (x for at in upstream if at.name in varying for x in tensors_in(at.meta.get("val")))
            if not any(x.is_floating_point() for x in given):
                angles.update(upstream)
    return rotary, angles


def _routing_nodes(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Operations that compute the scores of discrete choices, such as those of experts, from the nearest product on."""
    result = set[fx.Node]()
    for node in reversed(nodes):
        is_discrete = any(not x.is_floating_point() for x in tensors_in(node.meta.get("val")))
        if node.op != "call_function" or not is_discrete or row_of(node).asks_shape:
            continue
        for source in node.all_input_nodes:
            if source.op == "call_function" and any(x.is_floating_point() for x in tensors_in(source.meta["val"])):
                result.update(_of_product(source))
    return result


def _through(node: fx.Node | None) -> Iterator[fx.Node]:
    """A node and its inputs, back through reshapes and casts, to the operation that computes the value."""
    while node is not None:
        yield node
        node = next(iter(node.all_input_nodes), None) if row_of(node).transparent else None


def _of_product(node: fx.Node) -> list[fx.Node]:
    """A node and its first inputs, back to the nearest matrix product; [] if no product precedes the node."""
    result = [node]
    while not row_of(result[-1]).product and len(result) < len(node.graph.nodes):
        before = [source for source in result[-1].all_input_nodes if source.op == "call_function"]
        if not before:
            return []
        result.append(before[0])
    return result


def shares(
    problem: Problem, plan: Plan, flips: Callable[[float], float | None] = lambda error: None
) -> tuple[float, tuple[PartShare, ...]]:
    """A plan's first-order error, and each part's share of its square. flips(error): expected flips per 1,000
    tokens."""
    resolution = problem.resolve(choice_from_scopes(plan.scopes))
    part_of = parts_of(problem.capture)
    squares = defaultdict[str, float](float)
    counts = defaultdict[str, int](int)
    for name, square in problem.squares(resolution, problem.figures(resolution)[0]).items():
        if square > 0 and math.isfinite(square):
            part = part_of[name]
            squares[part] += square
            counts[part] += name in problem.capture.nodes
    total = sum(squares.values())
    result = list[PartShare]()
    for part, square in squares.items():
        error_of_others = math.sqrt(max(total - square, 0.0))
        result.append(PartShare(part, square / total, counts[part], flips(error_of_others)))
    result.sort(key=lambda part: -part.share)
    return math.sqrt(total), tuple(result)
