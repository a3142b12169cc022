"""Teach real weights sums by reinforcement learning from one command, beside TRL at equal settings, with several seeds.

python -m benchmarks.real_weights_rl BASE [--steps 100] [--seeds 3] [--peers trl] [--out FOLDER] [--results FILE]

BASE is SmolLM2-135M-Instruct as a Hugging Face folder; prompts, rewards and settings are those of examples/rl_arithmetic. Ours
with seed 0 has the GPU for itself; all others share it afterwards, so that their seconds compare with each other alone. Each
run records its rewards and the share of held-out sums that its greedy answers solve; the weights with the highest held-out
reward of the runs with seed 0 are judged by transformers.
"""

import argparse
import json
import runpy
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .real_weights import Session, begun, device_name, ended, loaded

EXAMPLE = Path("examples/rl_arithmetic")
NUMBER = r"-?\d+"
TERMS = (2, 3, 4)  # numbers of a sum


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The keys that both have."""
    import yaml

    known = yaml.safe_load((EXAMPLE / "rl.yaml").read_text()) | {"steps": options.steps}
    return known | ({"prompts_per_step": 2, "samples": 2, "eval_every": 1} if options.quick else {})


def rewards_of(settings: dict[str, Any]) -> list[tuple[Any, float]]:
    """The reward functions with their weights."""
    from gpubound.rl import ExactMatch

    own, found = runpy.run_path(str(EXAMPLE / "rewards.py")), list[tuple[Any, float]]()
    for name, value in settings["rewards"].items():
        if name == "exact_match":
            found.append((ExactMatch(value["extract"]), value["weight"]))
        else:
            found.append((own[name.partition(":")[2]], value))
    return found


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_prompts(out: Path, quick: bool) -> None:
    subprocess.run([sys.executable, str(EXAMPLE / "prompts.py"), str(out)], check=True)
    for name in ("prompts", "eval"):
        if quick:
            rows = (out / f"{name}.jsonl").read_text().splitlines(keepends=True)
            (out / f"{name}.jsonl").write_text("".join(rows[:: len(rows) // 8]))


def ours(session: Session, settings: dict[str, Any], seed: int) -> subprocess.Popen:
    """`gpubound rl` with the example's config."""
    name, out = f"ours-{seed}", session.out
    files = ["--prompts", f"{out}/prompts.jsonl", "--eval-prompts", f"{out}/eval.jsonl", "--out", f"{out}/{name}"]
    keys = [word for key in ("steps", "prompts_per_step", "samples", "eval_every")
            for word in (f"--{key.replace('_', '-')}", str(settings[key]))]  # fmt: skip
    own = ["--model", session.base, "--seed", str(seed), "--device", session.device, "--export", f"{out}/{name}-hf"]
    return session.start(name, "gpubound", "rl", str(EXAMPLE / "rl.yaml"), *own, *files, *keys)


def theirs(session: Session, settings: dict[str, Any], seed: int) -> subprocess.Popen:
    job = {"base": session.base, "folder": str(session.out), "seed": seed, "device": session.device, "settings": settings}
    return session.start(f"trl-{seed}", "benchmarks.real_weights_rl", "--trl", json.dumps(job))


def of_ours(out: Path, name: str) -> dict[str, Any]:
    records = read(out / name / "steps.jsonl")
    steps = [record for record in records if "reward" in record]
    return {
        "reward": [record["reward"] for record in steps],
        "seconds": [record["seconds"] for record in steps],
        "held_out": {str(record["step"]): record["eval/exact_match"] for record in records if "eval_reward" in record},
    }


def trl(job: dict[str, Any]) -> None:
    """A run of TRL's GRPOTrainer: fp32 weights under bf16 autocast, as ours has fp32 masters."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from .real_weights_trl import give_our_rates, greedy, without_hashes

    without_hashes()
    settings, folder, name = job["settings"], Path(job["folder"]), f"trl-{job['seed']}"
    on_gpu, rewards = job["device"] == "cuda", rewards_of(settings)
    prompts, held_out = read(folder / "prompts.jsonl"), read(folder / "eval.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(job["base"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    answers = settings["prompts_per_step"] * settings["samples"]
    micro = min(64, answers)
    args = trl.GRPOConfig(
        output_dir=str(folder / name), seed=job["seed"], max_steps=settings["steps"], per_device_train_batch_size=micro,
        gradient_accumulation_steps=answers // micro, num_generations=settings["samples"], temperature=1.0, top_k=0, beta=0.0,
        max_completion_length=settings["max_new_tokens"], loss_type=settings["variant"], epsilon=0.2, epsilon_high=0.28,
        scale_rewards="group", reward_weights=[weight for _, weight in rewards], learning_rate=float(settings["lr"]),
        max_grad_norm=1.0, adam_beta2=0.99, weight_decay=0.0, bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=False,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
    )  # fmt: skip

    def of_texts(reward: Any) -> Any:  # chats have messages as completions here
        def scored(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
            return reward(completions=[completion[0]["content"] for completion in completions], **columns)

        scored.__name__ = getattr(reward, "__name__", type(reward).__name__)
        return scored

    found: dict[str, Any] = {"reward": [], "seconds": [], "held_out": {}}
    best, at = [float("-inf")], [0.0]

    def evaluate(policy: torch.nn.Module, step: int) -> None:
        policy.eval()
        with torch.autocast(job["device"], torch.bfloat16, enabled=on_gpu):
            asked = [
                tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in held_out
            ]
            texts = greedy(policy, tokenizer, asked, tokenizer.eos_token_id, settings["max_new_tokens"], job["device"])
        policy.train()
        values = [reward(completions=texts, answer=[row["answer"] for row in held_out]) for reward, _ in rewards]
        found["held_out"][str(step)] = fmean(values[0])
        (folder / f"{name}.json").write_text(json.dumps(found))  # a run that is cut short keeps what it had
        reward = sum(weight * fmean(own) for own, (_, weight) in zip(values, rewards, strict=True))
        if step and reward > best[0]:
            best[0] = reward
            for one in (policy, tokenizer):
                one.save_pretrained(f"{folder}/{name}-hf")

    class Evaluation(TrainerCallback):
        def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            evaluate(model, 0)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            found["reward"] += [logs["reward"]] if "reward" in logs else []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            at[0] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            found["seconds"].append(time.perf_counter() - at[0])
            if state.global_step % settings["eval_every"] == 0 or state.global_step == settings["steps"]:
                evaluate(model, state.global_step)

    trainer = trl.GRPOTrainer(
        model, [of_texts(reward) for reward, _ in rewards], args=args, train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer, callbacks=[Evaluation()],
    )  # fmt: skip
    give_our_rates(trainer, settings["warmup"], "constant")
    trainer.train()
    (folder / f"{name}.json").write_text(json.dumps(found))


def judged(folder: str, rows: list[dict[str, Any]], new: int, device: str) -> dict[str, float]:
    """The share of held-out sums that greedy answers solve, of all and by their terms, by transformers."""
    from gpubound.rl import ExactMatch

    from .real_weights_trl import greedy

    model, tokenizer = loaded(folder, device)
    asked = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows]
    texts = greedy(model, tokenizer, asked, tokenizer.eos_token_id, new, device)
    solved = ExactMatch(NUMBER)(completions=texts, answer=[row["answer"] for row in rows])
    parts = {f"{n} terms": [hit for hit, row in zip(solved, rows) if row["terms"] == n] for n in TERMS}
    return {"all": fmean(solved)} | {name: fmean(hits) for name, hits in parts.items() if hits}


def measured(session: Session, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run them all, print the curves by seed, then their means, and what transformers judges."""
    found: dict[str, dict[str, Any]] = {}

    def collect(name: str, process: subprocess.Popen) -> None:
        own, whole = name.startswith("ours"), ended(session, name, process, options.limit)
        if not (session.out / (f"{name}/steps.jsonl" if own else f"{name}.json")).exists():
            return
        of = of_ours(session.out, name) if own else json.loads((session.out / f"{name}.json").read_text())
        if not of["reward"]:
            return
        found[name] = of | {"whole": whole}
        solved = " ".join(f"{step}: {share:.1%}" for step, share in of["held_out"].items())
        alone = "alone" if name == "ours-0" else "beside others"
        seconds = f"{median(of['seconds']):.2f} s a step, {alone}"
        print(f"{name}: reward {of['reward'][0]:.3f} to {of['reward'][-1]:.3f}; solved {solved}; {seconds} ({session.after()})")

    collect("ours-0", ours(session, settings, 0))
    others = {f"trl-{seed}": theirs(session, settings, seed) for seed in range(options.seeds) if options.peers == "trl"}
    others |= {f"ours-{seed}": ours(session, settings, seed) for seed in range(1, options.seeds)}
    for name, process in sorted(others.items()):
        collect(name, process)
    print(f"\nsolved of the held-out sums, mean over seeds (least to most)   {device_name()}")
    for who in ("ours", "trl"):
        curves = [of["held_out"] for name, of in found.items() if name.startswith(who)]
        for step in min(curves, key=len) if curves else ():
            shares = [curve[step] for curve in curves]
            print(f"{who:5} step {step:>4}: {fmean(shares):6.1%} ({min(shares):.1%} to {max(shares):.1%})")
    rows, judgements = read(session.out / "eval.jsonl"), dict[str, dict[str, float]]()
    for name in ("before", *(name for name in ("ours-0", "trl-0") if (session.out / f"{name}-hf").exists())):
        folder = session.base if name == "before" else f"{session.out}/{name}-hf"
        judgements[name] = judged(folder, rows, settings["max_new_tokens"], session.device)
        print(f"{name}, by transformers: {', '.join(f'{part} {share:.1%}' for part, share in judgements[name].items())}")
    return {"settings": settings, "runs": found, "judged": judgements, "device": device_name()}


def main(argv: list[str]) -> int:
    if argv[:1] == ["--trl"]:
        trl(json.loads(argv[1]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", default="trl", choices=["trl", "none"])
    parser.add_argument("--out", type=Path, default=Path("/tmp/real-weights-rl"))
    parser.add_argument("--results", type=Path, help="file that the numbers are written to, as JSON")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all runs")
    parser.add_argument("--quick", action="store_true", help="few prompts and answers: shows that the script works")
    options = parser.parse_args(argv)
    session = begun(options.base, options.out)
    write_prompts(options.out, options.quick)
    try:
        table = measured(session, settings_of(options), options)
    finally:
        session.end()
    if options.results:
        options.results.write_text(json.dumps(table, indent=1) + "\n")
    expected = options.seeds * (2 if options.peers == "trl" else 1)
    return 0 if sum(run["whole"] for run in table["runs"].values()) == expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
