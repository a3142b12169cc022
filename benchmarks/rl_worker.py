"""The contenders of reinforcement learning, one a process. Each says when it is ready, and measures what stdin asks for.

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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gpubound as gb
from gpubound.device import uncounted_bytes
from gpubound.rl.batches import RowShape, advantages, micro_batches
from gpubound.rl.episodes import Episode
from gpubound.rl.loop import prepare, take_steps
from gpubound.rl.rewards import AnswerGroup, RLPrompt

from .finetune_worker import dtype, tokenizer, words
from .harness import host_syncs, release
from .lora_worker import ALPHA, RANK, add
from .real_weights_trl import without_hashes
from .serving import Job, answer, settle
from .shapes import QWEN3, llama_config, qwen3_config, shape_of

LR = 1e-6
Measure = Callable[..., Any]
STEPS = 2  # of a peer: the first one is not timed


@dataclass(frozen=True)
class RLJob(Job):
    """A step's prompts, samples and new tokens; `seq`, `micro` and `accumulate` are a prompt with its answer, and TRL's
    micro-batches of answers."""

    prompts: int = 64
    samples: int = 8
    prompt: int = 128  # tokens
    new: int = 512
    lora: bool = False
    rows: int = 256  # sampled at once
    equal: tuple[int, ...] = (128, 256, 512)  # new tokens
    mean: int = 256  # of geometric lengths
    most: int = 2048
    sequences: int = 2048  # of geometric lengths; of own ones half as many
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
    return words(job.shape, np.full(STEPS * job.prompts, job.prompt), seed=0)


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def keys(job: RLJob) -> dict[str, Any]:
    """Return what a run has, ours and TRL's: the loss of GRPO, without a reference, an update a step."""
    return {
        "steps": 1, "prompts_per_step": job.prompts, "samples": job.samples, "max_new_tokens": job.new,
        "rollout_rows": job.rows, "variant": "grpo", "lr": LR, "device": job.device,
    }  # fmt: skip


def held_gib(job: RLJob) -> float | None:
    """The most memory that this process has held of the GPU."""
    if job.device == "cpu":
        return None
    return (torch.cuda.max_memory_reserved() + uncounted_bytes(torch.device(job.device))) / 2**30


def loop(job: RLJob, exact: bool | None = None) -> Measure:
    """A step of `gb.rl.train`: its seconds and those of its phases, tokens, and the gap between sampler and trainer.

    A rollout of few tokens and an update on few answers capture the graphs before. Nothing is saved: weights and moments of
    1.7b are 31 GB.
    """
    out = tempfile.TemporaryDirectory()
    recipe, model = gb.rl.RLRecipe(**keys(job), exact=exact, out=f"{out.name}/run"), policy(job)
    try:
        alone = learning_alone(job, recipe, model)
    except Exception as error:  # the step's own line is worth more
        print(f"{job.who}: training alone: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        alone = {"peak_gib": None, "syncs": None}
    release(torch.device(job.device))
    run = prepare(recipe, model, texts(job), None, even, None, tokenizer(job), False)
    run.save = lambda wait=False: None
    ids = [prompt.ids for prompt in run.prompts[: -(-job.rows // job.samples)]]
    for _ in range(2):
        run.decoder.rollout(ids, n=job.samples, max_new_tokens=min(8, job.new), stop=run.stop_tokens).sequences  # noqa: B018
        run.step(few_batches(job, run.shape, run.recipe)).read()
    run.objective.take_figures()

    def measure() -> dict[str, Any]:
        with out:
            take_steps(run)
            (step,) = run.tape.steps()
            run.close()
        facts = {name: step[name] for name in ("seconds", "tokens", "gap", "largest_gap")}
        phases = {name: step["seconds"] * step[f"{name}_share"] for name in ("sample", "reward", "learn")}
        return facts | {"phases": phases, "peak_gib": held_gib(job), "alone": alone}

    return measure


def learning_alone(job: RLJob, recipe: gb.rl.RLRecipe, model: nn.Module) -> dict[str, Any]:
    """Return what the step of such a run holds of the GPU without a sampler, and its host syncs, from answers to the update.

    It comes before the run, in its process: what it leaves, if anything, counts as the run's.
    """
    device = torch.device(job.device)
    shape = RowShape.of(job.prompts * job.samples, job.seq)
    exact = recipe.is_exact(model, device)
    step = recipe.training(shape.most).make_step(model.train(), recipe.objective(), device, exact=exact)

    def learn() -> None:
        step(few_batches(job, shape, recipe)).read()

    learn()
    learn()
    facts = {"peak_gib": held_gib(job), "syncs": None if job.device == "cpu" else host_syncs(learn)}
    step.close()
    return facts


def few_batches(job: RLJob, shape: RowShape, recipe: gb.rl.RLRecipe) -> list[dict[str, Tensor]]:
    """Return three micro-batches of random answers: with them each of a step's graphs is captured."""
    draw, vocabulary = np.random.default_rng(0), shape_of(job.shape).vocab
    groups = []
    for number in range(min(job.prompts, -(-3 * shape.rows * (shape.tokens // job.seq) // job.samples))):
        prompt = RLPrompt(None, draw.integers(2, vocabulary, job.prompt).tolist())
        answers = [
            Episode(
                prompt, number, sample, tokens=draw.integers(2, vocabulary, job.new).tolist(),
                logprobs=[-float(np.log(vocabulary))] * job.new, learnt=[True] * job.new,
            )
            for sample in range(job.samples)
        ]  # fmt: skip
        groups.append(AnswerGroup(prompt, answers, draw.random(job.samples).tolist()))
    return micro_batches(groups, advantages(groups, recipe.scaled), shape, torch.device(job.device))


def rollouts(job: RLJob, exact: bool = False) -> Measure:
    """Tokens a second of rollouts with log-probabilities, of the lengths that are asked for, and the host syncs inside one.

    Geometric lengths: the samples of a prompt have one length, or ("own") each sequence has its own prompt and length. They are
    the distribution's quantiles, whose mean is the one that is asked for: 256 that were drawn had a mean of 288. Their order is
    shuffled, and rates differ by 5 % with it, by when the longest begin: several orders are measured. Kernels are compiled and
    graphs captured before, by a third of them, the longest included, and by a first rollout, as of equal lengths.
    """
    most = max(job.equal) if exact else job.most
    decoder = gb.decoder(policy(job), max_batch=job.rows, max_length=job.prompt + most, verify="quick", exact=exact)
    vocabulary = shape_of(job.shape).vocab
    unlike = {
        name: quantiles(job.mean, count).clip(1, job.most)
        for name, count in (("geometric", job.sequences // job.samples), ("own", job.sequences // 2))
    }

    def rollout(lengths: Any, samples: int = job.samples, seed: int = 0) -> float:
        prompts = np.random.default_rng(1).integers(0, vocabulary, (len(lengths), job.prompt)).tolist()
        lengths = np.random.default_rng(seed).permutation(lengths).tolist()
        made = decoder.rollout(prompts, n=samples, max_new_tokens=lengths, seed=seed, stop=())
        assert sum(len(one.tokens) for one in made.sequences) == samples * sum(lengths)
        return made.tokens_per_s

    def third(name: str) -> Any:
        return np.sort(unlike[name])[::-1][::3]

    groups = job.rows // job.samples
    rollout(np.full(groups, min(job.equal)) if exact else third("geometric"))

    def measure(lengths: str) -> Any:
        if lengths == "syncs":
            some = unlike["geometric"][:groups].clip(1, job.mean)
            rollout(some)  # captures the prefill of fewer prompts
            return None if job.device == "cpu" else host_syncs(lambda: rollout(some))
        if lengths == "mean":
            return float(np.mean(unlike["geometric"]))
        if lengths == "geometric":
            return [rollout(unlike[lengths], seed=seed) for seed in range(4)][1:]
        if lengths == "own":
            rollout(third("own"), 1)
            return [rollout(unlike["own"], 1, seed=2)]
        return [rollout(np.full(groups, int(lengths)), seed=seed) for seed in range(3)][1:]

    return measure


def quantiles(mean: int, count: int) -> Any:
    """Return the quantiles of a geometric distribution of whole numbers from 1 on, at the middles of `count` equal shares."""
    return np.ceil(np.log1p(-(np.arange(count) + 0.5) / count) / np.log1p(-1 / mean)).astype(int)


def prefill(job: RLJob, exact: bool = False) -> Measure:
    """Seconds from a prompt to the first token of each of its samples, in turn with those of a single one."""
    decoder = gb.decoder(policy(job), job.samples, max(job.lengths) + 2, verify="quick", exact=exact)
    draw = np.random.default_rng(0)

    def seconds(prompt: list[int], samples: int) -> float:
        settle(job.device)
        began = time.perf_counter()
        assert len(decoder.rollout([prompt], n=samples, max_new_tokens=1, stop=()).sequences) == samples
        return time.perf_counter() - began

    def measure(length: int) -> dict[str, list[float]]:
        prompt = draw.integers(0, shape_of(job.shape).vocab, length).tolist()
        taken = [(seconds(prompt, job.samples), seconds(prompt, 1)) for _ in range(job.prefills + 3)][3:]
        return {"ours": [one for one, _ in taken], "one sample": [one for _, one in taken]}

    for length in job.lengths:
        measure(length)
    return measure


def trl(job: RLJob, continuous: bool = False) -> Measure:
    """TRL's GRPOTrainer, two steps of it, or one where the second would end after the limit."""
    return partial(train_by_trl, job, continuous)


def train_by_trl(job: RLJob, continuous: bool) -> dict[str, Any]:
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
        num_generations=job.samples, max_completion_length=job.new, max_steps=STEPS, temperature=1.0, top_k=0, beta=0.0,
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


CONTENDERS: dict[str, Callable[[RLJob], Measure]] = {
    "loop": loop,
    "loop-not-exact": partial(loop, exact=False),
    "rollouts": rollouts,
    "rollouts-exact": partial(rollouts, exact=True),
    "prefill": prefill,
    "prefill-exact": partial(prefill, exact=True),
    "trl": trl,
    "trl-continuous": partial(trl, continuous=True),
}


if __name__ == "__main__":
    job = RLJob(**json.loads(sys.argv[1]))
    measure = CONTENDERS[job.who](job)
    answer("ready")
    for line in sys.stdin:
        answer(measure(**json.loads(line)))
