"""Sampling for TRL's GRPOTrainer: its `rollout_func` from a decoder on the trainer's own weights."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

from ..decode import FastDecoder, decoder

STEP = 256  # positions that the decoder's length is rounded up to, so that few prompts need another decoder


def rollout_func(max_batch: int = 256, **options: Any) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """Return a `rollout_func` for `trl.GRPOTrainer`, which samples its completions by `gb.decoder`.

    The decoder reads the weights that the trainer updates. It is built at the first call, and again where a prompt is longer
    than all before. Settings of sampling are those of GRPOConfig; its `generation_kwargs` are refused.

    max_batch  sequences at a time; others follow as rows end
    options    of `gb.decoder`, such as cache="fp8"

    Example: GRPOTrainer(model, rewards, args, train_dataset=data, rollout_func=rollout_func())
    """
    fast: FastDecoder | None = None
    calls = 0

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        nonlocal fast, calls
        if trainer.args.generation_kwargs:
            raise ValueError(
                f"rollout_func: generation_kwargs: got {sorted(trainer.args.generation_kwargs)}, which the decoder does not "
                f"read; set temperature, top_k, top_p, min_p and repetition_penalty of GRPOConfig."
            )
        ids = tokenized(prompts, trainer)
        length = max(map(len, ids)) + trainer.max_completion_length
        if fast is None or fast.max_length < length:
            model = trainer.accelerator.unwrap_model(trainer.model)
            fast = None  # its cache is freed before the next one's is allocated
            fast = decoder(model, max_batch=min(max_batch, len(ids)), max_length=-(-length // STEP) * STEP, **options)
        groups = [(prompt, len(list(same))) for prompt, same in groupby(ids)]  # the trainer repeats a prompt for its samples
        samples = max(count for _, count in groups)
        even = all(count == samples for _, count in groups)
        sequences = fast.rollout(
            [prompt for prompt, _ in groups] if even else ids,
            n=samples if even else 1,
            max_new_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
            top_k=trainer.top_k or 0,
            top_p=trainer.top_p,
            min_p=trainer.min_p or 0.0,
            repetition_penalty=trainer.repetition_penalty,
            stop=trainer.eos_token_ids,
            seed=trainer.args.seed + 1_000_003 * calls,
        ).sequences
        calls += 1
        return {
            "prompt_ids": ids,
            "completion_ids": [one.tokens for one in sequences],
            "logprobs": [one.logprobs for one in sequences],
        }

    return rollouts


def tokenized(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Return the tokens of prompts, which are texts or lists of messages, as GRPOTrainer itself makes them."""
    if isinstance(prompts[0], str):
        return trainer.processing_class(text=prompts)["input_ids"]
    return trainer.processing_class.apply_chat_template(
        prompts,
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **trainer.chat_template_kwargs,
    )
