"""Write sums of two to four numbers as prompts with answers: a verifiable task, made without a network.

python examples/rl_arithmetic/prompts.py FOLDER    prompts.jsonl and eval.jsonl, which share no sum
"""

import json
import random
import sys
from pathlib import Path

ASK = "What is {}? Write the number alone."
LENGTHS = ((2, 20, 600), (3, 9, 600), (4, 9, 300))  # terms, the largest number, how many of them


def rows(draw: random.Random, terms: int, largest: int, count: int) -> list[dict]:
    """Different sums and differences of `terms` numbers up to `largest`, with an answer of at least 0."""
    found: dict[str, int] = {}
    for _ in range(20 * count):
        text = str(draw.randint(1, largest))
        for _ in range(terms - 1):
            text += f" {draw.choice('+-')} {draw.randint(1, largest)}"
        if eval(text) >= 0 and len(found) < count:
            found[text] = eval(text)
    asked = [[{"role": "user", "content": ASK.format(text)}] for text in found]
    return [{"prompt": p, "answer": answer, "terms": terms} for p, answer in zip(asked, found.values())]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    kept: dict[str, list[dict]] = {"prompts": [], "eval": []}
    for terms, largest, count in LENGTHS:
        made = rows(draw, terms, largest, count)
        held_out = len(made) // 10
        kept["eval"] += made[:held_out]
        kept["prompts"] += made[held_out:]
    for name, part in kept.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    print(", ".join(f"{len(part):,} in {name}.jsonl" for name, part in kept.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
