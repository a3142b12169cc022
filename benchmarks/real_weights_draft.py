"""Train a draft head on what real weights write, and measure how many of its tokens they accept and at what speed.

python -m benchmarks.real_weights_draft BASE [--steps 2000] [--drafted 1,2,3,4] [--results FILE] [--quick]

BASE is SmolLM2-135M-Instruct as a Hugging Face folder. Its answers to questions about Python's standard library, and what it
writes after heads of the library's functions, are the texts that the head learns from; other questions and functions are held
out. Plain and drafted decoding of these at batch 1 take turns, and their greedy tokens are compared.
"""

import argparse
import ast
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from .real_weights import device_name, loaded

EVALUATED = 16  # prompts of each kind
VOCABULARY = 16384  # tokens that the head may draft: the most frequent ones of the texts, then the first of the vocabulary
ROWS, LENGTH, GUESSES, ROUNDS = 32, 320, 3, 3


def prompts(quick: bool) -> dict[str, list[str]]:
    """Questions, and heads of functions with their first line, in a random order."""
    sys.path.insert(0, "examples")
    from docstring_chats import functions

    shuffled, pairs = random.Random(0), functions()
    shuffled.shuffle(pairs)
    chat = [f"What is {name} of Python's module {module} for? Give an example." for module, name in pairs]
    code = []
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                code.append(f'def {node.name}({ast.unparse(node.args)}):\n    """{text.splitlines()[0]}"""\n')
    shuffled.shuffle(code)
    most = 2 * EVALUATED if quick else 1024
    return {"chat": chat[:most], "code": code[:most]}


def encoded(tokenizer: Any, kind: str, texts: list[str]) -> list[list[int]]:
    if kind == "code":
        return [tokenizer(text)["input_ids"][: LENGTH // 4] for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]


def sample_texts(model: Any, texts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """What the model writes after these prompts at temperature 0.7, with the prompt, and the seconds that it took."""
    import gpubound

    begun = time.perf_counter()
    decoder = gpubound.decoder(model, max_batch=256 if len(texts) >= 256 else len(texts), max_length=LENGTH + 64)
    sequences = decoder.rollout(texts, max_new_tokens=new, temperature=0.7, logprobs=False).sequences
    return [texts[one.prompt] + list(one.tokens) for one in sequences], time.perf_counter() - begun


def batches(rows: list[list[int]], device: str) -> Any:
    """Yield batches of ROWS texts without end: each row padded, its padding marked as not learnt."""
    import torch

    order = random.Random(1)
    while True:
        order.shuffle(rows)
        for first in range(0, len(rows) - ROWS + 1, ROWS):
            ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
            labels = torch.full_like(ids, -100)
            for at, row in enumerate(rows[first : first + ROWS]):
                cut = torch.tensor(row[:LENGTH])
                ids[at, : len(cut)] = labels[at, : len(cut)] = cut
            yield {"input_ids": ids.to(device), "labels": labels.to(device)}


def train(model: Any, rows: list[list[int]], steps: int, device: str) -> tuple[Any, dict[str, Any]]:
    """A head that learnt for so many steps, and what its training took, with the first step, which captures."""
    import torch

    import gpubound
    from gpubound.train.objectives.draft_head import DraftLoss

    counts = torch.bincount(torch.tensor([token for row in rows for token in row]), minlength=model.config.vocab_size)
    head = gpubound.DraftHead.for_model(
        model, tokens=counts.sort(descending=True, stable=True).indices[:VOCABULARY].sort().values
    )
    schedule = gpubound.Schedule("linear", steps=steps, warmup=0.05)
    step = gpubound.TrainStep(
        head, DraftLoss(model, tokens=GUESSES), gpubound.AdamW(lr=2e-3, betas=(0.9, 0.95)), schedule=schedule
    )
    source, begun = batches(rows, device), time.perf_counter()
    losses = [float(step([next(source)]).loss) for _ in range(steps)]
    took = time.perf_counter() - begun
    return head, {"steps": steps, "seconds": took, "first": losses[0], "last": median(losses[-20:])}


def measured(
    model: Any, head: Any, eval_prompts: dict[str, list[list[int]]], drafted: list[int], new: int
) -> list[dict[str, Any]]:
    """Tokens a step and the speed beside plain decoding, over the prompts of each kind at batch 1, in turns."""
    import gpubound

    table, plain = [], gpubound.decoder(model, max_length=LENGTH + 64)
    for count in drafted:
        decoders = {"plain": plain}
        decoders["drafted"] = gpubound.decoder(
            model, max_length=LENGTH + 64, speculate=gpubound.Draft(head, count, tensor_cores=True)
        )
        for kind, texts in eval_prompts.items():
            for decoder in decoders.values():
                decoder.generate(texts[0], max_new_tokens=new, stop=())
            speeds, tokens, accepted = {name: list[float]() for name in decoders}, dict[str, Any](), 0.0
            for _ in range(ROUNDS):
                for name, decoder in decoders.items():
                    runs = [decoder.generate(text, max_new_tokens=new, stop=()) for text in texts]
                    speeds[name].append(sum(run.count for run in runs) / sum(run.seconds for run in runs))
                    tokens[name] = [run.tokens[0] for run in runs]
                    accepted = sum(run.count for run in runs) / sum(run.row_steps for run in runs)
            equal = sum(a == b for a, b in zip(tokens["plain"], tokens["drafted"])) / len(texts)
            ratios = sorted(mine / other for mine, other in zip(speeds["drafted"], speeds["plain"]))
            table.append({
                "kind": kind, "drafted": count, "tokens_a_step": accepted, "tokens_per_s": median(speeds["drafted"]),
                "plain_tokens_per_s": median(speeds["plain"]), "ratio": median(ratios), "least": ratios[0], "equal": equal,
            })  # fmt: skip
            one = "{kind} {drafted} drafted: {tokens_a_step:.2f} tokens a step, {tokens_per_s:,.0f} tok/s, {ratio:.2f} of plain"
            print((one + "; {equal:.0%} of the texts equal").format(**table[-1]), flush=True)
    return table


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base")
    parser.add_argument("--steps", type=int, default=2000, help="of training, 32 texts each")
    parser.add_argument("--drafted", default="1,2,3,4", help="tokens drafted a step, by comma")
    parser.add_argument("--results", type=Path, help="file that the numbers are written to, as JSON")
    parser.add_argument("--quick", action="store_true", help="few texts and steps: shows that the script works")
    options = parser.parse_args(argv)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = loaded(options.base, device)
    known = {kind: encoded(tokenizer, kind, texts) for kind, texts in prompts(options.quick).items()}
    eval_prompts = {kind: texts[: 2 if options.quick else EVALUATED] for kind, texts in known.items()}
    new = 12 if options.quick else LENGTH - LENGTH // 4
    rows, wrote = sample_texts(model, [text for texts in known.values() for text in texts[EVALUATED:]], new)
    print(f"{len(rows)} texts, {sum(map(len, rows)):,} tokens, written in {wrote:.1f} s", flush=True)
    head, training = train(model, rows, 2 if options.quick else options.steps, device)
    print("trained {steps} steps in {seconds:.1f} s: KL {first:.2f} to {last:.2f}".format(**training), flush=True)
    table = measured(model, head, eval_prompts, [*map(int, options.drafted.split(","))], new)
    if options.results:
        facts = {"training": training, "texts": len(rows), "rows": table, "device": device_name(), "torch": torch.__version__}
        options.results.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
