"""One table of whole work beside everything else that a user could run: its rows are cases, its columns kinds of rivals."""

import re
from collections.abc import Iterable, Sequence

from .gates import figure
from .results import Line

# What each column holds, by the names that benches give their peers. Of several in one column the strongest counts.
RIVALS = {
    "torch, eager": ("eager", "hf", "hf-autocast", "trainer", "usual", "frames-usual", "peft", "peft-autocast", "ddp", "fsdp",
                     "fsdp-peft"),
    "torch.compile": ("compile", "compile-max", "hf-compile", "peft-compile", "peft-compile-autocast", "ddp-compile",
                      "fsdp-compile"),
    "Liger": ("liger", "liger-autocast", "liger-cutedsl", "liger-cutile", "peft-liger", "peft-liger-autocast", "ddp-liger",
              "fsdp-liger", "fsdp-peft-liger"),
    "a CUDA graph by hand": ("graph",),
    "gpt-fast's design": ("gpt-fast",),
    "continuous batching": ("continuous",),
}  # fmt: skip
BENCHES = {
    "train": "training",
    "trainer": "",
    "lora": "LoRA",
    "ranks": "training",
    "decode": "decoding",
    "deepseek": "decoding",
}
WORDS = """\
## Beside everyone

Whole training steps and whole requests, in the units of a user. A cell holds ours over the rival, from one run of both; where
a rival was measured in several ways, its fastest counts. **Bold**: the rival is ahead. Memory, and single kernels, stand below.

What the others do that this table does not show: torch.compile fuses any model, also those that gpubound runs as they are;
Liger patches Hugging Face classes in one line and keeps no fp32 sum of gradients; vLLM serves requests that come and go, and
was not measured here.
"""


def table(lines: Sequence[Line]) -> str:
    """The section, or nothing where no such work was measured."""
    rows: dict[tuple[str, str], dict[str, Line]] = {}
    for line in lines:
        column = next((name for name, peers in RIVALS.items() if line.peer_name in peers), None)
        if column is None or line.bench not in BENCHES or line.unit != "tok/s":
            continue
        found = rows.setdefault((line.bench, line.case), {})
        if column not in found or line.ratio < found[column].ratio:
            found[column] = line
    if not rows:
        return ""
    used = [name for name in RIVALS if any(name in found for found in rows.values())]
    text = [WORDS, f"| work | ours | {' | '.join(used)} |", "|" + "---|" * (len(used) + 2)]
    for (bench, case), found in sorted(rows.items(), key=lambda row: _place(row[0], rows)):
        newest = max(found.values(), key=lambda line: line.date)
        what = f"{BENCHES[bench]} {case}".strip()
        cells = [_cell(found.get(name)) for name in used]
        text.append(f"| {what} | {figure(newest.ours, newest.unit)} | {' | '.join(cells)} |")
    return "\n".join([*text, ""])


def _place(row: tuple[str, str], rows: Iterable[tuple[str, str]]) -> tuple[int, ...]:
    """Bench by bench, model by model as they first appear, then by the numbers in the case."""
    bench, case = row
    shapes = [other.split()[0] for _, other in rows]
    return (list(BENCHES).index(bench), shapes.index(case.split()[0]), *(int(n) for n in re.findall(r"\d+", case)))


def _cell(line: Line | None) -> str:
    if line is None:
        return ""
    words = f"{line.ratio:.2f}" if line.ratio < 10 else f"{line.ratio:.0f}"
    return f"**{words}**" if line.ratio < 1 else words
