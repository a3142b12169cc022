"""Fine-tune real weights from one command each, beside TRL on the same examples: all weights, adapters, preferences.

python -m benchmarks.real_weights BASE [--only sft,lora,dpo] [--peers trl,trl-fp32] [--seeds 3] [--out FOLDER] [--results FILE]

BASE is SmolLM2-135M-Instruct as a Hugging Face folder; the examples are those of examples/docstring_chats.py. The runs with
seed 0 have the GPU for themselves while they train; those with other seeds share it, and only their losses count. Everything is
judged by transformers: the loss of held-out answers, and the share of them that greedy decoding gives to the letter.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"epochs": 4, "lr": 1e-4, "micro_batch": 4, "seq": 512, "pack": "examples"},
    "lora": {"epochs": 4, "lr": 1e-3, "micro_batch": 4, "seq": 512, "pack": "examples", "rank": 16, "alpha": 32},
    "dpo": {"epochs": 2, "lr": 5e-5, "micro_batch": 64, "pack": "pairs", "rank": 16, "alpha": 32},  # rows, two a pair
}
"""What each run has, ours and TRL's: linear schedule to 0 after 5 steps, AdamW with betas 0.9 and 0.999, no decay, norm 1."""
WARMUP = 5
# TRL as it comes, with Liger's kernels, and without autocast: what rounding to bf16 does to small adapters.
PEERS = ("trl", "trl-liger", "trl-fp32")
HELD_OUT_PAIRS = 128


class Session:
    """The folder of the runs, the GPU's lock, and the processes that train."""

    def __init__(self, base: str, out: Path, device: str):
        self.base, self.out, self.device = base, out, device
        self.began = time.perf_counter()
        self.started: list[subprocess.Popen] = []

    def after(self) -> str:
        return f"{time.perf_counter() - self.began:.0f} s"

    def model(self, run: str) -> str:
        """The folder that a run begins with: preferences follow the first run of all weights."""
        return str(self.out / "sft-ours-0-hf") if run == "dpo" else self.base

    def ours(self, run: str, seed: int) -> subprocess.Popen:
        name, settings = f"{run}-ours-{seed}", dict(SETTINGS[run])
        train, held_out = files(run, self.out)
        config = {
            "model": self.model(run), "data": str(train), "eval_data": str(held_out), "out": str(self.out / name), "seed": seed,
            "schedule": "linear", "warmup": WARMUP, "final": 0.0, "betas": [0.9, 0.999], "weight_decay": 0.0, "clip": 1.0,
            "evals_per_epoch": 1, "patience": 0, "device": self.device,
        }  # fmt: skip
        if "rank" in settings:
            config["lora"] = {"rank": settings.pop("rank"), "alpha": settings.pop("alpha")}
        if run == "dpo":
            config["objective"] = "dpo"
        (self.out / f"{name}.yaml").write_text(json.dumps(config | settings))
        merged = ["--merge"] if "lora" in config else []
        return self.start(name, "gpubound", "train", f"{self.out}/{name}.yaml", "--export", f"{self.out}/{name}-hf", *merged)

    def theirs(self, run: str, peer: str, seed: int, alone: bool) -> subprocess.Popen:
        train, held_out = files(run, self.out)
        job = {
            "run": run, "base": self.model(run), "train": str(train), "held_out": str(held_out), "seed": seed,
            "out": str(self.out / f"{run}-{peer}-{seed}"), "liger": peer == "trl-liger", "device": self.device,
            "autocast": peer != "trl-fp32" and self.device == "cuda", "warmup": WARMUP,
            "lock": str(self.out / "gpu.lock") if alone else None, **SETTINGS[run],
        }  # fmt: skip
        return self.start(f"{run}-{peer}-{seed}", "benchmarks.real_weights_trl", json.dumps(job))

    def start(self, name: str, module: str, *arguments: str) -> subprocess.Popen:
        with open(self.out / f"{name}.log", "w") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=log, stderr=log)
        self.started.append(process)
        return process

    @contextmanager
    def gpu(self) -> Iterator[None]:
        """Hold the GPU: a peer loads its model and waits before its first step."""
        with open(self.out / "gpu.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()


def begun(base: str, out: Path) -> Session:
    """Return a session with an empty folder, whose processes need no network and find this source."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("OMP_NUM_THREADS", "4")  # a dozen processes share the host
    os.environ["PYTHONPATH"] = os.pathsep.join([f"{os.getcwd()}/src", os.getcwd(), os.environ.get("PYTHONPATH", "")])
    import torch

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return Session(base, out, "cuda" if torch.cuda.is_available() else "cpu")


def files(run: str, out: Path) -> tuple[Path, Path]:
    """(rows to train on, held-out rows) of a run."""
    kind = "pairs" if run == "dpo" else "chats"
    return out / f"{kind}-train.jsonl", out / f"{kind}-eval.jsonl"


def write_examples(out: Path, quick: bool) -> None:
    subprocess.run([sys.executable, "examples/docstring_chats.py", str(out / "qa")], check=True)
    for name, target in (("train", "chats-train"), ("eval", "chats-eval"), ("preferences", "pairs")):
        rows = (out / f"qa/{name}.jsonl").read_text().splitlines(keepends=True)[: 48 if quick else None]
        if target == "pairs":
            held_out = 8 if quick else HELD_OUT_PAIRS
            (out / "pairs-eval.jsonl").write_text("".join(rows[:held_out]))
            (out / "pairs-train.jsonl").write_text("".join(rows[held_out:]))
        else:
            (out / f"{target}.jsonl").write_text("".join(rows))


def of_ours(out: Path, name: str) -> dict[str, Any]:
    """The held-out loss by epoch, losses of steps, and the seconds of an epoch after the first: training alone."""
    records = [json.loads(line) for line in (out / name / "steps.jsonl").read_text().splitlines()]
    evaluated = [record for record in records if "held_out" in record]
    seconds, epoch = [record["seconds"] for record in records if "seconds" in record], len(records) // max(1, len(evaluated))
    later = seconds[epoch:] or seconds
    return {
        "held_out": [record["held_out"] for record in evaluated],
        "accuracy": [record["accuracy"] for record in evaluated if "accuracy" in record],
        "loss": [record["loss"] for record in records],
        "epoch_s": mean(later) * epoch,
        "steps": len(records),
    }


def of_theirs(out: Path, name: str) -> dict[str, Any]:
    found = json.loads((out / name / "result.json").read_text())
    return found | {"epoch_s": median(found["seconds"][1:] or found["seconds"])}


def ended(session: Session, name: str, process: subprocess.Popen, limit: float) -> bool:
    """Return whether a run ended well; print its last lines if it failed or is not over in time, and its fallbacks."""
    try:
        code: Any = process.wait(timeout=max(1.0, limit - (time.perf_counter() - session.began)))
    except subprocess.TimeoutExpired:
        code = "none in time"
        process.kill()
    lines = (session.out / f"{name}.log").read_text().strip().splitlines()
    if code:
        print(f"{name}: exit code {code}:", *lines[-6:], sep="\n    ", flush=True)
        return False
    for line in lines:
        if ("fallback" in line and "no fallback" not in line) or "of the positions" in line:
            print(f"    {name}: {line[:300]}", flush=True)
    return True


def finished(session: Session, name: str, process: subprocess.Popen, limit: float) -> dict[str, Any] | None:
    """Return what a run measured; None if it failed."""
    if not ended(session, name, process, limit):
        return None
    return of_ours(session.out, name) if "-ours-" in name else of_theirs(session.out, name)


def judged(folder: str, chats: list, device: str) -> tuple[float, float]:
    """(loss of held-out answers and the ends of their turns, share of exact greedy answers), by transformers."""
    from .real_weights_trl import greedy, held_out_loss, tokenized

    model, tokenizer = loaded(folder, device)
    rows = [tokenized(tokenizer, chat) for chat in chats]
    end = next(token for token in reversed(rows[0]["input_ids"]) if tokenizer.decode([token]).strip())
    prompts = [row["input_ids"][: row["completion_mask"].index(1)] for row in rows]
    answers = greedy(model, tokenizer, prompts, end, 12, device)
    hits = sum(text.strip() == chat[1]["content"] for text, chat in zip(answers, chats, strict=True))
    return held_out_loss(model, rows, device), hits / len(chats)


def loaded(folder: str, device: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base")
    parser.add_argument("--only", default="sft,lora,dpo")
    parser.add_argument("--peers", default="trl,trl-liger", help="none: leave TRL out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("/tmp/real-weights"))
    parser.add_argument("--results", type=Path, help="file that the numbers are written to, as JSON")
    parser.add_argument("--limit", type=float, default=200, help="seconds; other seeds are begun in the first three quarters")
    parser.add_argument("--quick", action="store_true", help="48 examples: shows that the script works")
    options = parser.parse_args(argv)
    runs = options.only.split(",")
    peers = [peer for peer in options.peers.split(",") if peer in PEERS]
    session = begun(options.base, options.out)
    write_examples(options.out, options.quick)
    if options.quick:
        for settings in SETTINGS.values():
            settings |= {"epochs": 2, "micro_batch": 4 if settings["pack"] == "pairs" else 1}
    try:
        table = measured(session, runs, peers, options)
    finally:
        session.end()
    if options.results:
        options.results.write_text(json.dumps(table, indent=1) + "\n")
    return 0 if table["runs"] else 1


def measured(session: Session, runs: list[str], peers: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Train with seed 0 one after another, then the other seeds at once while the first are judged, and print both tables."""
    import torch

    chats = [json.loads(line)["messages"] for line in (session.out / "chats-eval.jsonl").read_text().splitlines()]
    found: dict[str, dict[str, Any]] = {}

    def collect(name: str, process: subprocess.Popen, began: float | None = None) -> None:
        if (result := finished(session, name, process, options.limit)) is None:
            return
        found[name] = result | ({} if began is None else {"command_s": time.perf_counter() - began})
        curve, steps = " ".join(f"{loss:.3f}" for loss in result["held_out"]), result["steps"]
        print(f"{name}: {steps} steps, held out {curve}, {result['epoch_s']:.2f} s an epoch ({session.after()})", flush=True)

    for run in runs:
        if run == "dpo" and not Path(session.model(run)).exists():
            if "sft" in runs:
                print(f"dpo: there is no {session.model(run)}, as sft failed", flush=True)
                continue
            collect("sft-ours-0", session.ours("sft", 0))
        with session.gpu():
            waiting = {f"{run}-{peer}-0": session.theirs(run, peer, 0, alone=True) for peer in peers}
            began = time.perf_counter()
            collect(f"{run}-ours-0", session.ours(run, 0), began)
        for name, process in waiting.items():
            collect(name, process)
    others = {}
    if time.perf_counter() - session.began < options.limit * 3 / 4:
        for seed in range(1, options.seeds):
            for run in runs:
                if Path(session.model(run)).exists():
                    others[f"{run}-ours-{seed}"] = session.ours(run, seed)
                    for peer in (peer for peer in peers if peer != "trl-liger"):
                        others[f"{run}-{peer}-{seed}"] = session.theirs(run, peer, seed, alone=False)
    judgements = {"before": judged(session.base, chats, session.device)}
    for name in found:
        if (session.out / f"{name}-hf").exists():
            judgements[name] = judged(f"{session.out}/{name}-hf", chats, session.device)
            print(f"{name}: judged ({session.after()})", flush=True)
    for name, process in others.items():
        collect(name, process)
    print(f"\n{'run':18} {'held-out loss':>14} {'exact':>7} {'epoch':>8} {'command':>9}   {device_name()}, {torch.__version__}")
    for name, (loss, exact) in judgements.items():
        one = found.get(name, {})
        print(f"{name:18} {loss:14.3f} {exact:7.1%} {one.get('epoch_s', 0):6.2f} s {one.get('command_s', 0):7.1f} s")
    spreads = [line for run in runs if (line := compared(run, found))]
    print("\nlast held-out loss by seed", *spreads, f"{session.after()}", sep="\n", flush=True)
    rows = {name: {"loss": loss, "exact": exact} for name, (loss, exact) in judgements.items()}
    return {"settings": SETTINGS, "judged": rows, "runs": found, "device": device_name(), "torch": torch.__version__}


def compared(run: str, found: dict[str, dict[str, Any]]) -> str:
    """The last held-out losses of all seeds of a run, ours and the peers', and how far the means are apart."""
    last: dict[str, list[float]] = {}
    for name, of in found.items():
        if name.startswith(f"{run}-"):
            last.setdefault(name.removeprefix(f"{run}-").rpartition("-")[0], []).append(of["held_out"][-1])
    ours = last.pop("ours", [])
    lines = [f"{run}: ours {' '.join(f'{loss:.4f}' for loss in ours)}"]
    for who, losses in last.items() if ours else ():
        spread = max(max(each) - min(each) for each in (ours, losses))
        apart = f"means differ by {abs(mean(ours) - mean(losses)):.4f}, seeds by up to {spread:.4f}"
        lines.append(f"{who} {' '.join(f'{loss:.4f}' for loss in losses)}: {apart}")
    return "; ".join(lines) if lines[1:] else ""


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
