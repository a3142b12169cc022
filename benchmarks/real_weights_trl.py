"""One fine-tuning run by TRL: SFTTrainer or DPOTrainer, on the examples and with the settings of `real_weights`.

Rows are tokenised as ours are. Held-out losses are TRL's own for preferences; for chats the mean over the same tokens, computed
by the trainer's model at the end of each epoch.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def tokenized(tokenizer: Any, chat: list[dict[str, str]]) -> dict[str, list[int]]:
    """The tokens of a chat of two messages, and the mask of those that are learnt: the answer, its end and the newline."""
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    return {"input_ids": ids, "completion_mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))}


def held_out_loss(model: Any, rows: list[dict[str, list[int]]], device: str, autocast: bool = True) -> float:
    """The mean loss of the tokens that are learnt, 64 padded rows at a time."""
    import torch
    import torch.nn.functional as F

    total, tokens = 0.0, 0
    for at in range(0, len(rows), 64):
        part = rows[at : at + 64]
        width = max(len(row["input_ids"]) for row in part)
        ids, learnt = (
            torch.tensor([row[key] + [0] * (width - len(row[key])) for row in part], device=device)
            for key in ("input_ids", "completion_mask")
        )
        labels = torch.where(learnt.bool(), ids, -100)[:, 1:].flatten()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast and device == "cuda"):
            logits = model(input_ids=ids).logits[:, :-1].float().flatten(0, 1)
        total += F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        tokens += int((labels != -100).sum())
    return total / tokens


def give_our_rates(trainer: Any, warmup: float, shape: str = "linear") -> None:
    """Let a trainer take the rates of our schedule: its own is a step behind while it warms up, and 0 in the first."""
    from torch.optim.lr_scheduler import LambdaLR

    from gpubound.train.schedule import Schedule

    def create(num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        rates = Schedule(shape, num_training_steps, warmup)
        trainer.lr_scheduler = LambdaLR(optimizer or trainer.optimizer, lambda done: rates.factor(done + 1))
        return trainer.lr_scheduler

    trainer.create_scheduler = create


def greedy(model: Any, tokenizer: Any, prompts: list[list[int]], end: int, new: int, device: str) -> list[str]:
    """The greedy answers of up to `new` tokens, without their ends, 64 prompts at a time."""
    import torch

    texts = []
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    for at in range(0, len(prompts), 64):
        part = prompts[at : at + 64]
        longest = max(map(len, part))
        left = torch.tensor([[end] * (longest - len(p)) + p for p in part], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part], device=device)
        with torch.no_grad():
            answers = model.generate(left, attention_mask=mask, **options)[:, longest:].tolist()
        cut = [answer[: answer.index(end)] if end in answer else answer for answer in answers]
        texts += tokenizer.batch_decode(cut, skip_special_tokens=True)
    return texts


def without_hashes() -> None:
    """Make datasets' hashes of functions, which cannot be made everywhere, numbers: nothing here is cached."""
    from itertools import count

    import datasets.fingerprint

    number = count()
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: f"{next(number):016x}")


def main(job: dict[str, Any]) -> None:
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    without_hashes()
    on_gpu, pairs, out = job["device"] == "cuda", job["run"] == "dpo", Path(job["out"])
    tokenizer = AutoTokenizer.from_pretrained(job["base"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)  # under bf16 autocast, as Trainer does it
    rows, held_out = ([json.loads(line) for line in Path(job[name]).read_text().splitlines()] for name in ("train", "held_out"))
    wanted: dict[str, Any] = {
        "output_dir": str(out), "seed": job["seed"], "num_train_epochs": job["epochs"], "learning_rate": job["lr"],
        "per_device_train_batch_size": job["micro_batch"] // (2 if pairs else 1), "weight_decay": 0.0, "max_grad_norm": 1.0,
        "bf16": job["autocast"], "use_cpu": not on_gpu,
        "gradient_checkpointing": False, "use_liger_kernel": job["liger"], "report_to": [], "save_strategy": "no",
        "logging_steps": 10, "disable_tqdm": True, "optim": "adamw_torch_fused" if on_gpu else "adamw_torch",
    }  # fmt: skip
    adapters = None
    if "rank" in job:
        adapters = LoraConfig(r=job["rank"], lora_alpha=job["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    if pairs:
        args = trl.DPOConfig(**wanted, eval_strategy="epoch", per_device_eval_batch_size=64)
        data, test = Dataset.from_list(rows), Dataset.from_list(held_out)
    else:
        # by default TRL learns the prompts of rows that are tokenised already, too
        args = trl.SFTConfig(**wanted, packing=True, max_length=job["seq"], completion_only_loss=True)
        data, test = ([tokenized(tokenizer, row["messages"]) for row in part] for part in (rows, held_out))
        data = Dataset.from_list(data)
    results: dict[str, Any] = {"held_out": [], "seconds": [], "accuracy": []}
    began = [0.0]

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    class Clock(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            wait()
            began[0] = time.perf_counter()

        def on_epoch_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            wait()
            results["seconds"].append(time.perf_counter() - began[0])
            if not pairs:
                model.eval()
                results["held_out"].append(held_out_loss(model, test, job["device"], job["autocast"]))
                model.train()

        def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
            results["held_out"].append(metrics["eval_loss"])
            results["accuracy"].append(metrics["eval_rewards/accuracies"])

    make = trl.DPOTrainer if pairs else trl.SFTTrainer
    trainer = make(
        model, args=args, train_dataset=data, eval_dataset=test if pairs else None, processing_class=tokenizer,
        peft_config=adapters, callbacks=[Clock()],
    )  # fmt: skip
    give_our_rates(trainer, job["warmup"])
    if not pairs:
        results["learnt"] = sum(label != -100 for row in trainer.train_dataset for label in row["labels"])
    with open(job["lock"] or os.devnull, "w") as lock:
        if job["lock"]:
            fcntl.flock(lock, fcntl.LOCK_EX)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    out.mkdir(exist_ok=True)
    (out / "result.json").write_text(json.dumps(results | {"loss": losses, "steps": trainer.state.global_step}))
    trained = trainer.accelerator.unwrap_model(trainer.model)
    trained = trained.merge_and_unload() if adapters else trained
    trained.to(torch.bfloat16).save_pretrained(f"{out}-hf")
    tokenizer.save_pretrained(f"{out}-hf")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
