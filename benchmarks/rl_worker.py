"""The contenders of reinforcement learning, one a process: peaks of memory must not mix. Each says what it measured, and ends.

Everyone has random weights in bf16, prompts of one length, and a reward that Python computes from token ids. TRL's GRPOTrainer
runs inside its own `train()`; its weights are bf16, which is its fastest.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

import gpubound as gb
from gpubound.device import uncounted_bytes
from gpubound.rl.batches import RowShape, advantages, micro_batches
from gpubound.rl.episodes import Episode
from gpubound.rl.rewards import AnswerGroup, RLPrompt

from .finetune_worker import dtype, tokenizer, words
from .harness import host_syncs
from .lora_worker import ALPHA, RANK, add
from .real_weights_trl import without_hashes
from .serving import Job, answer, settle
from .shapes import QWEN3, llama_config, qwen3_config, shape_of

LR = 1e-6


@dataclass(frozen=True)
class RLJob(Job):
    """A step's prompts, samples and new tokens; `seq`, `micro` and `accumulate` are a prompt with its answer, and TRL's
    micro-batches of answers."""

    prompts: int = 64
    steps: int = 3  # of the loop; the first one captures graphs
    samples: int = 8
    prompt: int = 128  # tokens
    new: int = 512
    lora: bool = False
    rows: int = 256  # sampled at once
    equal: tuple[int, ...] = (128, 256, 512)  # new tokens
    mean: int = 256  # of geometric lengths
    most: int = 2048
    sequences: int = 2048  # of geometric lengths
    lengths: tuple[int, ...] = (64, 512, 2048)  # of a prompt that is prefilled
    prefills: int = 20  # of each
    limit: float = 75.0  # seconds of a peer


def policy(job: RLJob, adapters: bool = True) -> nn.Module:
    """Return a model with random weights, placed, with adapters where the job has them."""
    model = plain(job)
    gb.place(model, job.device)
    return add(model) if job.lora and adapters else model


def plain(job: RLJob) -> nn.Module:
    from transformers import AutoModelForCausalLM

    shape, positions = shape_of(job.shape), max(job.seq, job.prompt + job.most)
    config = qwen3_config(shape, positions) if job.shape in QWEN3 else llama_config(shape, positions)
    config.use_cache, config.bos_token_id, config.eos_token_id = True, None, None
    torch.manual_seed(0)
    with torch.device(job.device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype(job))


def texts(job: RLJob) -> list[str]:
    """Return the prompts of a run."""
    return words(job.shape, np.full(job.steps * job.prompts, job.prompt), seed=0)


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def keys(job: RLJob) -> dict[str, Any]:
    """Return what a run has, ours and TRL's: the loss of GRPO, without a reference, an update a step."""
    return {
        "steps": job.steps, "prompts_per_step": job.prompts, "samples": job.samples, "max_new_tokens": job.new,
        "rollout_rows": job.rows, "variant": "grpo", "lr": LR, "device": job.device,
    }  # fmt: skip


def held_gib(job: RLJob) -> float | None:
    """The most memory that this process has held of the GPU."""
    if job.device == "cpu":
        return None
    return (torch.cuda.max_memory_reserved() + uncounted_bytes(torch.device(job.device))) / 2**30


def loop(job: RLJob, exact: bool | None = None) -> dict[str, Any]:
    """`gb.rl.train`: seconds of a step and of its phases, tokens, and the gap between sampler and trainer."""
    with tempfile.TemporaryDirectory() as out:
        run = gb.rl.train(policy(job), texts(job), even, tokenizer=tokenizer(job), exact=exact, out=f"{out}/run", **keys(job))
        steps = run.tape.steps()[1:]
    phases = {name: fmean(step["seconds"] * step[f"{name}_share"] for step in steps) for name in ("sample", "reward", "learn")}
    return {
        "seconds": fmean(step["seconds"] for step in steps),
        "phases": phases,
        "tokens": fmean(step["tokens"] for step in steps),
        "gap": fmean(step["gap"] for step in steps),
        "largest_gap": max(step["largest_gap"] for step in steps),
        "peak_gib": held_gib(job),
    }


def learning(job: RLJob) -> dict[str, Any]:
    """The step of such a run alone, on random answers: seconds, memory and host syncs, from answers to the update.

    It is measured once a line on stdin asks for it, so that it may become ready while another process does.
    """
    recipe, device, draw = gb.rl.RLRecipe(**keys(job)), torch.device(job.device), np.random.default_rng(0)
    vocabulary = shape_of(job.shape).vocab

    def answer_of(prompt: RLPrompt, number: int, sample: int) -> Episode:
        tokens = draw.integers(2, vocabulary, job.new).tolist()
        return Episode(
            prompt, number, sample, tokens=tokens, logprobs=[-float(np.log(vocabulary))] * job.new, learnt=[True] * job.new
        )

    prompts = [RLPrompt(None, draw.integers(2, vocabulary, job.prompt).tolist()) for _ in range(job.prompts)]
    groups = [
        AnswerGroup(
            prompt, [answer_of(prompt, number, sample) for sample in range(job.samples)], draw.random(job.samples).tolist()
        )
        for number, prompt in enumerate(prompts)
    ]
    shape = RowShape.of(job.prompts * job.samples, job.seq)
    step = recipe.training(shape.most).make_step(policy(job).train(), recipe.objective(), device)

    def seconds(groups: list[AnswerGroup]) -> float:
        began = time.perf_counter()
        step(micro_batches(groups, advantages(groups, recipe.scaled), shape, device)).read()
        return time.perf_counter() - began

    few = groups[: -(-3 * shape.rows * (shape.tokens // job.seq) // job.samples)]  # of three micro-batches: all graphs
    for _ in range(2):
        seconds(few)
    answer("ready")
    if not sys.stdin.readline():
        sys.exit()
    facts = {"seconds": seconds(groups), "peak_gib": held_gib(job)}
    return facts | {"syncs": None if job.device == "cpu" else host_syncs(lambda: seconds(few))}


def rollouts(job: RLJob, exact: bool = False) -> dict[str, Any]:
    """Tokens a second of rollouts with log-probabilities, after one that captures the graphs, and the host syncs inside one.

    Geometric lengths: the samples of a prompt have one length, or ("own") each sequence has its own prompt and length. Each
    round has them in another order: as they are drawn, a prompt of 1,771 tokens begins among the last, and 1,086 of 3,766 steps
    have 16 rows or fewer.
    """
    decoder = gb.decoder(policy(job), max_batch=job.rows, max_length=job.prompt + job.most, exact=exact)
    draw, vocabulary = np.random.default_rng(0), shape_of(job.shape).vocab

    def rollout(lengths: list[int], samples: int, seed: int = 0) -> Any:
        prompts = np.random.default_rng(1).integers(0, vocabulary, (len(lengths), job.prompt)).tolist()
        made = decoder.rollout(prompts, n=samples, max_new_tokens=lengths, seed=seed, stop=())
        assert sum(len(one.tokens) for one in made.sequences) == samples * sum(lengths)
        return made

    def rates(lengths: list[int], samples: int, rounds: int) -> list[float]:
        orders = (np.random.default_rng(seed).permutation(lengths).tolist() for seed in range(rounds + 1))
        return [rollout(order, samples, seed).tokens_per_s for seed, order in enumerate(orders)][1:]

    found: dict[str, Any] = {f"{new}": rates([new] * (job.rows // job.samples), job.samples, 3) for new in job.equal}
    unlike = {
        name: draw.geometric(1 / job.mean, job.sequences // samples).clip(1, job.most).tolist()
        for name, samples in (("geometric", job.samples), ("own", 1))
    }
    found["geometric"] = rates(unlike["geometric"], job.samples, 3)
    found["own"] = rates(unlike["own"], 1, 1)
    few = unlike["geometric"][: 2 * job.rows // job.samples]
    syncs = None if job.device == "cpu" else host_syncs(lambda: rollout(few, job.samples))
    return {"rates": found, "mean": float(np.mean(unlike["geometric"])), "syncs": syncs}


def prefill(job: RLJob, exact: bool = False) -> dict[str, Any]:
    """Seconds from a prompt to the first token of each of its samples, in turn with those of a single one."""
    decoder = gb.decoder(policy(job), max_batch=job.rows, max_length=max(job.lengths) + 2, exact=exact)
    draw, found = np.random.default_rng(0), dict[str, dict[int, list[float]]]()

    def seconds(prompt: list[int], samples: int) -> float:
        settle(job.device)
        began = time.perf_counter()
        assert len(decoder.rollout([prompt], n=samples, max_new_tokens=1, stop=()).sequences) == samples
        return time.perf_counter() - began

    for length in job.lengths:
        prompt = draw.integers(0, shape_of(job.shape).vocab, length).tolist()
        taken = [(seconds(prompt, job.samples), seconds(prompt, 1)) for _ in range(job.prefills + 3)][3:]
        found[f"{length}"] = {"ours": [one for one, _ in taken], "one sample": [one for _, one in taken]}
    return found


def trl(job: RLJob, continuous: bool = False) -> dict[str, Any]:
    """TRL's GRPOTrainer, two steps of it, or one where the second would end after the limit."""
    os.environ["HF_HUB_OFFLINE"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"
    began = time.perf_counter()
    timer = threading.Timer(job.limit, stop_late, [job])
    timer.daemon = True
    timer.start()
    import datasets
    import trl
    from transformers import TrainerCallback

    without_hashes()
    adapters = None
    if job.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules="all-linear", task_type="CAUSAL_LM")
    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=job.micro, gradient_accumulation_steps=job.accumulate,
        num_generations=job.samples, max_completion_length=job.new, max_steps=2, temperature=1.0, top_k=0, beta=0.0,
        loss_type="grpo", learning_rate=LR, adam_beta2=0.99, lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.0,
        bf16=job.device != "cpu", use_cpu=job.device == "cpu", gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_steps=1_000, disable_tqdm=True, optim="adamw_torch_fused" if job.device != "cpu" else "adamw_torch",
        use_transformers_continuous_batching=continuous,
    )  # fmt: skip
    steps, phases = list[float](), {"sample": list[float](), "reward": list[float]()}
    at = [0.0]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            settle(job.device)
            at[0] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            settle(job.device)
            steps.append(time.perf_counter() - at[0])
            control.should_training_stop |= time.perf_counter() - began + steps[-1] > job.limit

    trainer = trl.GRPOTrainer(
        plain(job), even, args=args, train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in texts(job)]),
        processing_class=tokenizer(job), peft_config=adapters, callbacks=[Clock()],
    )  # fmt: skip
    tokens: list[int] = []

    def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            settle(job.device)
            start = time.perf_counter()
            result = inner(*given, **options)
            settle(job.device)
            phases[name].append(time.perf_counter() - start)
            if name == "sample":
                tokens.append(sum(map(len, result[1])))
            return result

        return call

    trainer._generate = timed("sample", trainer._generate)
    trainer._calculate_rewards = timed("reward", trainer._calculate_rewards)
    trainer.train()
    timer.cancel()
    last = {name: values[-1] for name, values in phases.items()}
    last["learn"] = steps[-1] - sum(last.values())
    return {"seconds": steps[-1], "phases": last, "tokens": tokens[-1], "steps": len(steps), "peak_gib": held_gib(job)}


def stop_late(job: RLJob) -> None:
    print(f"{job.who}: no step has ended within {job.limit:.0f} s; give a longer --limit.", file=sys.stderr, flush=True)
    os._exit(1)


CONTENDERS: dict[str, Callable[[RLJob], dict[str, Any]]] = {
    "loop": loop,
    "loop-not-exact": partial(loop, exact=False),
    "learning": learning,
    "rollouts": rollouts,
    "rollouts-exact": partial(rollouts, exact=True),
    "prefill": prefill,
    "prefill-exact": partial(prefill, exact=True),
    "trl": trl,
    "trl-continuous": partial(trl, continuous=True),
}


if __name__ == "__main__":
    job = RLJob(**json.loads(sys.argv[1]))
    answer(CONTENDERS[job.who](job))
