"""Write sums of two to five numbers as prompts with answers: a verifiable task, made without a network.

python examples/rl_arithmetic/prompts.py FOLDER [LARGEST]    prompts.jsonl and eval.jsonl, which share no sum
"""

import json
import random
import sys
from pathlib import Path

ASK = "What is {}? Write the number alone."


def rows(draw: random.Random, terms: int, largest: int, count: int) -> list[dict]:
    """Different sums and differences of `terms` numbers up to `largest`, in the order that a reader would say them."""
    found: dict[str, int] = {}
    for _ in range(20 * count):
        text = str(draw.randint(1, largest))
        for _ in range(terms - 1):
            text += f" {draw.choice('+-')} {draw.randint(1, largest)}"
        if eval(text) >= 0 and len(found) < count:
            found[text] = eval(text)
    asked = [[{"role": "user", "content": ASK.format(text)}] for text in found]
    return [{"prompt": p, "answer": answer, "terms": terms} for p, answer in zip(asked, found.values())]


def main(folder: Path, largest: int = 9) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    kept: dict[str, list[dict]] = {"prompts": [], "eval": []}
    for terms in (2, 3, 4, 5):
        made = rows(draw, terms, largest, 1000)
        draw.shuffle(made)
        held_out = min(50, len(made) // 5)
        kept["eval"] += made[:held_out]
        kept["prompts"] += made[held_out:]
    for name, part in kept.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    print(", ".join(f"{len(part):,} in {name}.jsonl" for name, part in kept.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
