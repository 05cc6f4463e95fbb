"""Prompts, and decoding token by token: for causal and encoder-decoder models of transformers, or a `step` function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ...errors import LoadError
from ...isolation import isolate
from ...isolation.process import disable_compilers, disable_fused_path
from ...isolation.run_model import Around
from ...records import Batch

DECODER_MASK = "decoder_attention_mask"
LEAST = 2
"""Minimum tokens of a prompt: a single token does not test the attention to earlier tokens."""

cannot_generate = partial(LoadError, slug="cannot-generate")
"""The error for a model or inputs that generation does not support."""

Choose = Callable[[int, torch.Tensor], torch.Tensor]
"""A function that chooses tokens: (step, logits [prompts, vocabulary]) -> next tokens [prompts]."""

Store = Callable[[Any], None]
"""A function that changes, in place, the cache that one step passes to the next."""

CACHES = ("cache", "past_key_values")
"""Names of the argument, and of the output, that is the cache: in transformers from 5.24, and before."""


@dataclass(frozen=True)
class Prompts:
    """One batch of prompts. ids, mask: [prompts, tokens], shorter prompts padded on the left.

    kind: the way in which the model decodes. rest: an encoder's inputs, by name. ends: ids of end-of-text tokens.
    A decoder gets the mask only if a prompt is padded.
    """

    kind: Literal["step", "causal", "encoder-decoder"]
    ids: torch.Tensor
    mask: torch.Tensor
    rest: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[int, ...] = ()

    def forced_inputs(self, model: nn.Module, tokens: torch.Tensor) -> Batch:
        """Inputs of one forward that predicts each of these tokens [prompts, steps] from the tokens before it."""
        ids = torch.cat([self.ids, tokens[:, :-1]], 1)
        if self.kind == "step":
            return (ids,), {}
        mask = torch.cat([self.mask, torch.ones_like(tokens[:, :-1])], 1)
        given: dict[str, Any] = {"logits_to_keep": tokens.shape[1], "use_cache": False}
        if self.kind == "causal":
            given |= {"input_ids": ids, **_places(mask, ids.shape[1])}
        else:
            given |= {**self.rest, "decoder_input_ids": ids, **_decoder_mask(mask)}
        return (), _accepted_arguments(model, given)


def prompts_of(model: nn.Module, batch: Batch) -> Prompts:
    """Extract the prompts of a batch.

    Raises: LoadError(slug="cannot-generate") if the model cannot generate from them.
    """
    names = inspect.signature(model.forward).parameters
    args, kwargs = batch
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    has_cache = _cache_argument(model) is not None
    step = getattr(model, "step", None)
    if callable(step) and len(inspect.signature(step).parameters) > 1:
        ids = _check_ids(model, next(iter(given.values()), None))
        result = Prompts("step", ids, torch.ones_like(ids), ends=_ends(model))
    elif has_cache and "decoder_input_ids" in names:
        return _decoder_prompts(model, given)
    elif has_cache and "input_ids" in names:
        result = _causal_prompts(model, given)
    else:
        raise cannot_generate(
            f"{type(model).__name__} cannot generate token by token: its forward takes no "
            "cache (past_key_values), and it has no step(tokens, state) that returns logits and a state"
        )
    if int(result.mask.sum(1).min()) < LEAST:
        raise cannot_generate(f"a prompt has fewer than {LEAST} tokens: give longer prompts for --generate")
    return result


def _decoder_prompts(model: nn.Module, given: dict[str, Any]) -> Prompts:
    """The prompts of a decoder, by default its start token, with the inputs of the encoder."""
    ids = given.pop("decoder_input_ids", None)
    mask = given.pop(DECODER_MASK, None)
    given.pop("labels", None)  # a loss needs as many of them as tokens
    first = next((x for x in given.values() if isinstance(x, torch.Tensor)), None)
    if ids is None and first is not None:
        start = _token_of(model, "decoder_start_token_id")
        if start is None:
            raise cannot_generate(
                f"the config of {type(model).__name__} has no decoder_start_token_id: set it, or give decoder_input_ids"
            )
        ids = torch.full((first.shape[0], 1), int(start), device=first.device)
    ids, mask = _padded_left(_check_ids(model, ids), mask)
    return Prompts("encoder-decoder", ids, mask, given, _ends(model))


def _causal_prompts(model: nn.Module, given: Mapping[str, Any]) -> Prompts:
    """The prompts of a language model, with their padding at the left."""
    for name, value in given.items():
        is_content = isinstance(value, torch.Tensor) and value.is_floating_point() and name != "attention_mask"
        if is_content or (name in CACHES and value is not None):
            raise cannot_generate(
                f"{type(model).__name__} generates from token ids alone, and the inputs contain {name}: give input_ids "
                "and attention_mask only"
            )
    ids, mask = _padded_left(_check_ids(model, given.get("input_ids")), given.get("attention_mask"))
    return Prompts("causal", ids, mask, ends=_ends(model))


def _padded_left(ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask, both [prompts, tokens], with the padding moved to the left. mask: None without padding."""
    if mask is None:
        return ids, torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise cannot_generate(
            f"the mask has the shape {list(mask.shape)}, and the prompts {list(ids.shape)}: give a mask [prompts, tokens]"
        )
    mask = mask.to(ids)
    tokens_last = mask.bool().to(torch.int8).argsort(dim=1, stable=True)
    return ids.gather(1, tokens_last), mask.gather(1, tokens_last)


def _cache_argument(model: nn.Module) -> str | None:
    """The name of the argument of the model's forward that takes a cache; None if there is none."""
    names = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHES if name in names), None)


def _results_of(model: nn.Module, result: Any) -> tuple[torch.Tensor, Any]:
    """The last token's logits [prompts, vocabulary], and the cache, in the result of a model of transformers.

    Raises: LoadError(slug="cannot-generate") if one of them is missing.
    """
    logits = getattr(result, "logits", None)
    cache = next((result[name] for name in CACHES if name in result), None)
    if logits is None or logits.dim() != 3 or cache is None:
        raise cannot_generate(
            f"{type(model).__name__} returns no logits [prompts, tokens, vocabulary] with a cache: give a model that "
            "predicts the next token, such as one from AutoModelForCausalLM, with return_dict=True in its config"
        )
    return logits[:, -1], cache


def _check_ids(model: nn.Module, ids: Any) -> torch.Tensor:
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        return ids
    raise cannot_generate(
        f"the inputs of {type(model).__name__} contain no prompts: give token ids [prompts, "
        "tokens], or text for a model with a tokenizer"
    )


def _token_of(model: Any, name: str) -> Any:
    """The id, or ids, of a special token in the model's generation config or config; None without."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        given = getattr(holder, name, None)
        if given is not None:
            return given
    return None


def _ends(model: Any) -> tuple[int, ...]:
    given = _token_of(model, "eos_token_id")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (int(given),)


def _places(mask: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """The attention mask, and the positions of each text's last `count` tokens, without padding."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, -count:]}


def _decoder_mask(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """A decoder's mask, as an argument of forward; nothing without padding."""
    return {} if bool(mask.all()) else {DECODER_MASK: mask}


def _accepted_arguments(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `given` that name an argument of the model's forward."""
    names = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in given.items() if name in names}


@contextmanager
def _call_step(model: nn.Module) -> Iterator[nn.Module]:
    """In the `with` block, a call of the model runs its `step`, not its forward, inside all wrappers and hooks."""
    kind: Any = type(model)

    def forward(self: Any, *given: Any) -> Any:
        self.__class__ = kind  # a step may call the model itself
        try:
            return kind.step(self, *given)
        finally:
            self.__class__ = stepping

    stepping = type(kind.__name__, (kind,), {"forward": forward})
    model.__class__ = stepping
    try:
        yield model
    finally:
        model.__class__ = kind


def advance(model: nn.Module, prompts: Prompts, fed: torch.Tensor, mask: torch.Tensor, state: Any) -> tuple[Any, Any]:
    """Feed tokens to the model; return the next logits [prompts, vocabulary] and the state for the next step."""
    if prompts.kind == "step":
        with _call_step(model):
            answered = model(fed, state)
        if not isinstance(answered, tuple | list) or len(answered) != 2:
            raise cannot_generate(f"step of {type(model).__name__} must return two values, logits and a state")
        logits, state = answered
        return logits[:, -1] if logits.dim() == 3 else logits, state
    cache = str(_cache_argument(model))
    given: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
    if prompts.kind == "causal":
        given |= {"input_ids": fed, cache: state, **_places(mask, fed.shape[1])}
        result = model(**_accepted_arguments(model, given))
        return _results_of(model, result)
    given |= {"decoder_input_ids": fed, **_decoder_mask(mask)}
    if state is None:
        result = model(**_accepted_arguments(model, {**prompts.rest, **given}))
        logits, past = _results_of(model, result)
        return logits, (past, result.encoder_last_hidden_state)
    past, encoded = state
    read = {name: x for name, x in prompts.rest.items() if name == "attention_mask"}
    result = model(**_accepted_arguments(model, {**read, **given, cache: past, "encoder_outputs": (encoded,)}))
    logits, past = _results_of(model, result)
    return logits, (past, encoded)


def decode(
    model: nn.Module,
    prompts: Prompts,
    steps: int,
    choose: Choose,
    *,
    seed: int,
    around: Around,
    store: Store | None = None,
) -> None:
    """Continue the prompts for `steps` tokens, which `choose` selects; afterwards the model is restored.

    store: a function that rounds the cache after each step.
    """
    fed, mask, state = prompts.ids, prompts.mask, None
    with isolate(model, seed=seed), torch.no_grad(), disable_fused_path(), disable_compilers(), around():
        for step in range(steps):
            logits, state = advance(model, prompts, fed, mask, state)
            if store is not None:
                store(state[0] if prompts.kind == "encoder-decoder" else state)
            fed = choose(step, logits.float())[:, None]
            mask = torch.cat([mask, torch.ones_like(fed)], 1)
