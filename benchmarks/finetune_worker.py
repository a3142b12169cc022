"""The contenders of fine-tuning with adapters, one a process: our TrainStep, and TRL's trainers inside their own `train()`.

Everyone reads the same rows with the same tokenizer: words of a vocabulary, in examples whose lengths are drawn as those of
chats (packed_rows.lengths). The first wish of a process is answered when its first steps are done; every later one times steps
and counts what they learnt: tokens of examples, or pairs of answers.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpubound as gb
from gpubound.data import Corpus
from gpubound.train.objectives.preference import Preference

from .lora_worker import ALPHA, RANK, add
from .packed_rows import lengths
from .real_weights_trl import without_hashes
from .serving import Job, answer, job_given, settle
from .shapes import shape_of
from .train_worker import llama

EXAMPLES, PAIRS = 2000, 1000
SHARES = (0.5, 0.4, 0.3)  # of a pair's length: the prompt, the chosen and the rejected answer
WARMUP = 3  # steps
END, PAD = 0, 1

Steps = Callable[[int], tuple[float, int]]
"""(number of steps) -> seconds they took, what they learnt"""


def words(shape: str, sizes: np.ndarray, seed: int) -> list[str]:
    """Return texts of so many words."""
    drawn = np.random.default_rng(seed).integers(PAD + 1, shape_of(shape).vocab, int(sizes.sum()))
    return [" ".join(f"w{word}" for word in text) for text in np.split(drawn, np.cumsum(sizes)[:-1])]


def rows(job: Job, pairs: bool) -> list[dict[str, str]]:
    if not pairs:  # a token of each text is its end
        return [{"text": text} for text in words(job.shape, (lengths(job.seq)[:EXAMPLES] - 1).clip(1), 0)]
    whole = lengths(job.seq)[:PAIRS]
    prompt, *answers = (words(job.shape, (whole * share).astype(np.int64).clip(2), i) for i, share in enumerate(SHARES))
    return [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in zip(prompt, *answers, strict=True)]


def tokenizer(job: Job) -> Any:
    """A tokenizer of transformers with one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<end>": END, "<pad>": PAD} | {f"w{i}": i for i in range(PAD + 1, shape_of(job.shape).vocab)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def dtype(job: Job) -> torch.dtype:
    return torch.float32 if job.device == "cpu" else torch.bfloat16


def ours(job: Job, pairs: bool = False) -> Steps:
    folder = Path(tempfile.mkdtemp())
    tokenizer(job).save_pretrained(folder / "tokenizer")
    with open(folder / "rows.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(job, pairs))
    corpus = Corpus.build(folder / "rows.jsonl", str(folder / "tokenizer"), folder / "corpus", progress=False)
    model = llama(job, dtype(job))
    gb.place(model, job.device)
    add(model)
    optimizer = gb.AdamW(lr=job.lr, decays=lambda name, parameter: True)
    if pairs:
        feed = corpus.batches(2 * job.seq, job.micro // 2, job.device, pack="packed_pairs")
    else:
        feed = corpus.batches(job.seq, job.micro, job.device, pack="examples")
    step = gb.TrainStep(model, Preference() if pairs else "causal_lm", optimizer, accumulate=job.accumulate)

    def run(steps: int) -> tuple[float, int]:
        settle(job.device)
        began = time.perf_counter()
        results = [step(feed) for _ in range(steps)]
        settle(job.device)
        seconds = time.perf_counter() - began
        return seconds, sum(int(result.read().tokens) for result in results)

    return run


def trl(job: Job, pairs: bool = False, packing: bool = True, liger: bool = True, placed: bool = False) -> Steps:
    """A trainer of TRL, which runs `train()` in a thread and is held between two steps where nothing is timed."""
    os.environ["HF_HUB_OFFLINE"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"
    import datasets
    import trl
    from transformers import TrainerCallback

    without_hashes()
    model = llama(job, dtype(job))
    if placed:
        gb.place(model, job.device)
    from peft import LoraConfig

    given: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": job.micro, "max_steps": 1_000_000,
        "learning_rate": job.lr, "gradient_accumulation_steps": job.accumulate, "lr_scheduler_type": "constant",
        "use_liger_kernel": liger, "max_length": job.seq, "bf16": job.device != "cpu", "use_cpu": job.device == "cpu",
        "gradient_checkpointing": False, "report_to": [],
        "save_strategy": "no", "logging_steps": 1_000_000, "disable_tqdm": True, "optim": "adamw_torch_fused",
    }  # fmt: skip
    config = trl.DPOConfig(**given) if pairs else trl.SFTConfig(**given, packing=packing)
    adapters = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules="all-linear", task_type="CAUSAL_LM")
    data = datasets.Dataset.from_list(rows(job, pairs))
    make = trl.DPOTrainer if pairs else trl.SFTTrainer
    allowed, done = threading.Semaphore(0), threading.Semaphore(0)
    learnt = [torch.zeros((), dtype=torch.int64, device=job.device)]

    class Held(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            allowed.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.release()

    trainer = make(
        model, args=config, train_dataset=data, processing_class=tokenizer(job), peft_config=adapters, callbacks=[Held()]
    )
    compute = trainer.compute_loss

    def counted(model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        learnt[0] += len(inputs["input_ids"]) // 2 if pairs else (inputs["labels"] != -100).sum()
        return compute(model, inputs, *more, **options)

    trainer.compute_loss = counted
    failed: list[BaseException] = []

    def train() -> None:
        try:
            trainer.train()
        except BaseException as error:
            failed.append(error)
            done.release()

    threading.Thread(target=train, daemon=True).start()

    def run(steps: int) -> tuple[float, int]:
        settle(job.device)
        before, began = learnt[0].item(), time.perf_counter()
        for _ in range(steps):
            allowed.release()
            done.acquire()
            if failed:
                raise failed[0]
        settle(job.device)
        return time.perf_counter() - began, int(learnt[0].item() - before)

    return run


def serve(job: Job, steps: Steps) -> Iterator[Any]:
    began = time.perf_counter()
    steps(WARMUP)
    yield {"warmup_s": time.perf_counter() - began}
    for line in sys.stdin:
        wish = json.loads(line)
        if "memory" in wish:
            yield None if job.device == "cpu" else torch.cuda.max_memory_reserved() / 2**30
        else:
            yield steps(wish["steps"])


CONTENDERS: dict[str, Callable[[Job], Steps]] = {
    "ours": ours,
    "trl-packed": trl,
    "trl-placed": partial(trl, liger=False, placed=True),
    "trl-padded": partial(trl, packing=False),
    "trl-plain": partial(trl, packing=False, liger=False),
    "ours-dpo": partial(ours, pairs=True),
    "trl-dpo": partial(trl, pairs=True),
    "trl-dpo-plain": partial(trl, pairs=True, liger=False),
}


if __name__ == "__main__":
    job = job_given()
    for reply in serve(job, CONTENDERS[job.who](job)):
        answer(reply)
    os._exit(0)  # the trainer's thread waits for a step
