"""Train a draft head on what real weights write, and measure how many of its tokens they accept and at what speed.

python -m benchmarks.real_weights_draft BASE [--seconds 90] [--texts 16384] [--drafted 2,3,4,5] [--results FILE] [--quick]

BASE is SmolLM2-135M-Instruct as a Hugging Face folder. Its answers to questions about Python's standard library, and what it
writes after heads of the library's functions, are the texts that the head learns from; other questions and functions are held
out. Plain and drafted decoding of these at batch 1 take turns, and their greedy tokens are compared.
"""

import argparse
import ast
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from .real_weights import device_name, loaded

EVALUATED = 16  # prompts of each kind
VALIDATED = 64  # texts of the same samples that the head does not learn
VOCABULARY = 8192  # tokens that the head may draft: the most frequent ones of the texts, 99.6 % of these (16,384: all)
WIDTH = 3072  # of the head's MLP, twice the model's: reading it costs a draft less than its launches
ROWS, LENGTH, GUESSES, ROUNDS = 32, 320, 3, 3
LR, WARMUP, FINAL = 1.5e-3, 0.03, 0.02  # of a cosine over the time that the training takes
QUESTIONS = (
    "What is {name} of Python's module {module} for? Give an example.",
    "Explain {module}.{name} to a beginner.",
    "Write a short Python program that uses {name} from {module}, and say what it prints.",
)


def prompts(most: int) -> dict[str, list[str]]:
    """Questions, and heads of functions with their first line, in a random order. What the first EVALUATED of a kind are about,
    none of the others is about."""
    sys.path.insert(0, "examples")
    from docstring_chats import functions

    shuffled, pairs = random.Random(0), functions()
    shuffled.shuffle(pairs)
    chat = [
        QUESTIONS[i % len(QUESTIONS)].format(name=name, module=module) for i, (module, name) in enumerate(pairs[:EVALUATED])
    ]
    known = [question.format(name=name, module=module) for module, name in pairs[EVALUATED:] for question in QUESTIONS]
    shuffled.shuffle(known)
    code = set[str]()
    for file in Path(ast.__file__).parent.rglob("*.py"):
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & {*file.parts}:
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.FunctionDef) and (text := (ast.get_docstring(node) or "").strip()):
                    code.add(f'def {node.name}({ast.unparse(node.args)}):\n    """{text.splitlines()[0]}"""\n')
    listed = sorted(code)
    shuffled.shuffle(listed)
    return {"chat": (chat + known)[: most // 2], "code": listed[: most // 2]}


def encoded(tokenizer: Any, kind: str, texts: list[str]) -> list[list[int]]:
    if kind == "code":
        return [tokenizer(text)["input_ids"][: LENGTH // 4] for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]


def sample_texts(
    model: Any, given: list[list[int]], again: list[list[int]], count: int, new: int
) -> list[tuple[list[int], list[int]]]:
    """These prompts and what the model writes after each: its likeliest words, as when the head is measured, and for each
    fourth words at temperature 0.7.

    Those of `again` come again, at that temperature, until there are `count` texts: a head that had seen 4,096 texts 20 times
    knew them by heart (H200: KL 0.24, of others 0.66).
    """
    import gpubound

    texts = given[:count]
    texts += [again[i % len(again)] for i in range(count - len(texts))]
    decoder = gpubound.decoder(model, max_batch=min(256, count), max_length=LENGTH + 64)
    temperatures = [0.7 * (i % 4 == 3 or i >= len(given)) for i in range(count)]
    sequences = decoder.rollout(texts, max_new_tokens=new, temperature=temperatures, logprobs=False).sequences
    return [(texts[one.prompt], list(one.tokens)) for one in sequences]


def batches(rows: list[tuple[list[int], list[int]]], device: str, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield batches of ROWS texts without end, each row padded. What the model says at tokens of a prompt but the last one, and
    at padding, is not learnt: it drafts none of these."""
    import torch

    ids = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for at, (prompt, answer) in enumerate(rows):
        cut = torch.tensor((prompt + answer)[:LENGTH])
        ids[at, : len(cut)] = cut
        labels[at, len(prompt) - 1 : len(cut)] = cut[len(prompt) - 1 :]
    ids, labels, order = ids.to(device), labels.to(device), random.Random(seed)
    while True:
        chosen = torch.tensor(order.sample(range(len(rows)), len(rows)), device=device)
        for some in chosen.split(ROWS)[: len(rows) // ROWS]:
            yield {"input_ids": ids[some], "labels": labels[some]}


def train(
    model: Any, rows: list[tuple[list[int], list[int]]], seconds: float, device: str, say: Callable[[str], None]
) -> tuple[Any, dict[str, Any]]:
    """A head that learnt for so long behind its first step, which captures, and what its training took."""
    import torch

    import gpubound
    from gpubound.train.objectives.draft_head import DraftLoss

    counts = torch.bincount(torch.tensor([token for _, row in rows for token in row]), minlength=model.config.vocab_size)
    known = counts.sort(descending=True, stable=True)
    words = known.indices[:VOCABULARY].sort().values
    loss = DraftLoss(model, tokens=GUESSES)
    covered, half = ((known.values[:most].sum() / counts.sum()).item() for most in (VOCABULARY, VOCABULARY // 2))
    head = gpubound.DraftHead.for_model(model, tokens=words, intermediate=WIDTH)
    step = gpubound.TrainStep(head, loss, gpubound.AdamW(lr=LR * FINAL, betas=(0.9, 0.95)), clip=1.0)
    held_out = next(batches(rows[:VALIDATED][:ROWS], device))
    source, begun = batches(rows[VALIDATED // ROWS * ROWS :], device), time.perf_counter()
    first = float(step([next(source)]).loss)
    facts: dict[str, Any] = {"first": first, "first_step_s": time.perf_counter() - begun, "covered": covered, "half": half}
    facts["curve"] = []
    say("first step: KL {first:.2f}, {first_step_s:.1f} s, {covered:.1%} of the words, half: {half:.1%}".format(**facts))
    begun, number, losses, parts = time.perf_counter(), 1, list[Any](), 0
    while (done := (time.perf_counter() - begun) / seconds) < 1:
        if number % 8 == 1:  # the host runs ahead of the device by no more steps than these
            step.lr = LR * min(done / WARMUP, FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * done))) + 1e-9
        losses.append(step([next(source)]).loss)
        number += 1
        if done * 6 > parts + 1:
            parts += 1
            last, found = torch.stack(losses[-20:]).mean().item(), loss.validate(head, [held_out])
            facts["curve"].append([number, time.perf_counter() - begun, last, found["held_out"], found["agreed"]])
            say("step {} after {:.1f} s: KL {:.3f}, held out {:.3f}, {:.1%} of the guesses agree".format(*facts["curve"][-1]))
    last, found = torch.stack(losses[-20:]).mean().item(), loss.validate(head, [held_out])
    facts |= {"steps": number, "seconds": seconds, "captured": len(step.captured), "last": last, **found}
    one = "{steps} steps, {captured} graphs: KL {last:.3f}, held out {held_out:.3f}, {agreed:.1%} of the guesses agree"
    say(one.format(**facts))
    step.close()
    return head, facts


def measured(
    model: Any, head: Any, texts: dict[str, list[list[int]]], drafted: list[int], new: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Tokens a step and the speed beside plain decoding, over the prompts of each kind at batch 1, in turns."""
    import gpubound

    decoders = {0: gpubound.decoder(model, max_length=LENGTH + 64, verify="quick")}
    for count in drafted:
        speculate = gpubound.Draft(head, count, tensor_cores=True)
        decoders[count] = gpubound.decoder(model, max_length=LENGTH + 64, speculate=speculate, verify="quick")
    for decoder in decoders.values():  # a prompt's graph is made when its length comes again
        for _ in range(2):
            for some in texts.values():
                decoder.generate(some[0], max_new_tokens=new)
                for prompt in some:
                    decoder.generate(prompt, max_new_tokens=2)
    say(f"{len(decoders)} decoders are ready")
    table = []
    for kind, some in texts.items():
        seconds = {count: [[0.0] * len(some) for _ in range(ROUNDS)] for count in decoders}
        found: dict[int, list[Any]] = {}
        for turn in range(ROUNDS):
            for count, decoder in decoders.items():
                found[count] = [decoder.generate(prompt, max_new_tokens=new) for prompt in some]
                seconds[count][turn] = [run.seconds for run in found[count]]
        tokens = {count: sum(run.count for run in runs) for count, runs in found.items()}
        plain = [median(times) for times in zip(*seconds[0])]
        for count in drafted:
            steps, own = sum(run.row_steps for run in found[count]), [median(times) for times in zip(*seconds[count])]
            speed, before = tokens[count] / sum(own), tokens[0] / sum(plain)
            # of each text: by its tokens, whose number differs where two logits lie within rounding
            ratios = [a.count / b * d / c.count for a, b, c, d in zip(found[count], own, found[0], plain)]
            equal = sum(a.tokens == b.tokens for a, b in zip(found[0], found[count])) / len(some)
            table.append({
                "kind": kind, "drafted": count, "tokens_a_step": tokens[count] / steps, "ms_a_step": 1e3 * sum(own) / steps,
                "plain_ms": 1e3 * sum(plain) / tokens[0], "tokens_per_s": speed, "plain_tokens_per_s": before,
                "ratio": speed / before, "least": min(ratios), "equal": equal,
            })  # fmt: skip
            one = "{kind} {drafted} drafted: {tokens_a_step:.2f} tokens a step of {ms_a_step:.3f} ms (plain {plain_ms:.3f}), "
            one += "{tokens_per_s:,.0f} tok/s, {ratio:.2f} of plain, {least:.2f} for the worst text; {equal:.0%} of texts equal"
            say(one.format(**table[-1]))
    return table


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base")
    parser.add_argument("--seconds", type=float, default=90.0, help=f"of training, in steps of {ROWS} texts")
    parser.add_argument("--texts", type=int, default=16384, help="that the model writes for the training")
    parser.add_argument("--drafted", default="2,3,4,5", help="tokens drafted a step, by comma")
    parser.add_argument("--results", type=Path, help="file that the numbers are written to, as JSON, as they come")
    parser.add_argument("--quick", action="store_true", help="few texts and steps: shows that the script works")
    options = parser.parse_args(argv)
    if options.quick:
        globals().update(VOCABULARY=256, WIDTH=64, ROWS=4, LENGTH=48, VALIDATED=4, EVALUATED=2, ROUNDS=1)
    begun = time.perf_counter()
    import torch

    import gpubound

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {what}", flush=True)

    def keep(**more: Any) -> None:
        facts.update(more)
        if options.results:
            options.results.write_text(json.dumps(facts, indent=1) + "\n")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts: dict[str, Any] = {"device": device_name(), "torch": torch.__version__}
    model, tokenizer = loaded(options.base, device)
    gpubound.place(model.requires_grad_(False), device=device)  # gradients of the model are not compared: it does not train
    known = prompts(8 * ROWS if options.quick else options.texts + 2 * EVALUATED)
    ids = {kind: encoded(tokenizer, kind, texts) for kind, texts in known.items()}
    new = 12 if options.quick else LENGTH - LENGTH // 4
    say("the model is placed")
    given = [text for texts in ids.values() for text in texts[EVALUATED:]]
    random.Random(2).shuffle(given)
    chats = [text for text in ids["chat"][EVALUATED:] if text not in given[:VALIDATED]]  # of code a head learns more from fewer
    rows = sample_texts(model, given, chats, len(given) if options.quick else options.texts, new)
    count = sum(len(prompt) + len(answer) for prompt, answer in rows)
    keep(texts=len(rows), tokens=count, written_s=time.perf_counter() - begun)
    say(f"{len(rows)} texts of {count:,} tokens are written")
    head, training = train(model, rows, 1.0 if options.quick else options.seconds, device, say)
    keep(training=training)
    evaluated = {kind: texts[:EVALUATED] for kind, texts in ids.items()}
    keep(rows=measured(model, head, evaluated, [*map(int, options.drafted.split(","))], new, say))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
