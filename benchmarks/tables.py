"""The page docs/figures.md: every measured case as a table, and first of all where the project falls short."""

from collections.abc import Mapping, Sequence

from . import beside
from .gates import figure
from .results import COUNTS, FLOOR, MEMORY, Line
from .wanted import Wanted

NAMES = {
    "eager": "torch, eager",
    "liger": "Liger",
    "liger-autocast": "Liger, bf16 autocast",
    "liger-cutedsl": "Liger, CuTe DSL",
    "liger-cutile": "Liger, cuTile",
    "quack-untuned": "quack, untuned",
    "flash-attn-4": "FlashAttention 4",
    "continuous": "Hugging Face, continuous batching",
    "hf": "Hugging Face",
    "trainer": "Hugging Face Trainer as it is",
    "compile": "torch.compile",
    "compile-max": "torch.compile, max-autotune",
    "graph": "Hugging Face in a CUDA graph",
    "graph-fla": "Hugging Face with FLA in a CUDA graph",
    "liger-fla": "Liger with FLA",
    "eager-fla": "torch, eager, with FLA",
    "frames-usual": "the usual loop",
    "usual": "the usual loop",
    "bf16": "ours in bf16",
    "ours-bf16": "ours in bf16",
    "accumulate 1": "ours without accumulation",
    "normal step": "ours without a checkpoint",
    "uncaptured": "ours without a graph",
    "peft": "PEFT",
    "peft-autocast": "PEFT, bf16 autocast",
    "peft-compile": "PEFT, torch.compile",
    "peft-compile-autocast": "PEFT, torch.compile, bf16 autocast",
    "peft-liger": "PEFT, Liger",
    "trl-packed": "TRL, packing, Liger",
    "trl-placed": "TRL, packing, gb.place",
    "trl-padded": "TRL, padding, Liger",
    "trl-plain": "TRL, padding",
    "trl-dpo": "TRL, Liger",
    "trl-dpo-plain": "TRL",
    "peft-liger-autocast": "PEFT, Liger, bf16 autocast",
    "ours-lora": "ours, one adapter over bf16",
    "ddp-liger": "DDP, Liger",
    "ddp-compile": "DDP, torch.compile",
    "fsdp-liger": "FSDP2, Liger",
    "fsdp-compile": "FSDP2, torch.compile",
    "fsdp-peft-liger": "FSDP2, PEFT, Liger",
    "dcp": "torch's own (DCP)",
    "cpu": "plain torch on this machine's CPU",
    "sdpa-cudnn": "SDPA of cuDNN (a softmax)",
    "next token": "the next token's step of the same model",
    "trl": "TRL",
    "trl-continuous": "TRL, continuous batching",
}
LIMITS = (
    "copy rate",
    "bf16 rate",
    "roofline",
    "sum of its kernels",
    "collected",
    "products alone",
)  # shares of these are percentages
OURSELVES = (
    "bf16", "ours-bf16", "uncaptured", "accumulate 1", "normal step", "ours-lora", "training alone", "not exact", "one sample",
    "equal lengths", "the longest rows", "its learning",
)  # fmt: skip
BUDGET = "budget"
ACCUMULATORS = " + fp32 accumulators"
UNITS = {
    "tok/s": "Speed, tokens per second",
    "steps/s": "Speed, steps per second",
    "pairs/s": "Speed, pairs per second",
    "GB/s": "Memory rate",
    "TFLOP/s": "Arithmetic rate",
    "GiB": "Peak memory",
    "syncs": "Host syncs",
    "nats": "Mean difference of log-probabilities",
    "launches": "Launches",
    "%": "GPU busy",
    "passed": "Tests",
}
TITLES = {
    "kernels": "Kernels",
    "train": "Training steps",
    "lora": "Low-rank adapters",
    "blocks": "Layers and blocks",
    "trainer": "Hugging Face Trainer",
    "packed": "Packed rows",
    "finetune": "Fine-tuning",
    "rl": "Reinforcement learning",
    "place": "Placed models, forward and backward",
    "memory": "Memory by phase and by option",
    "graph": "Captured forward passes",
    "feed": "Feeding",
    "decode": "Decoding",
    "families": "Families of models",
    "deepseek": "DeepSeek-V4",
    "checkpoint": "Checkpoints",
    "ranks": "Several GPUs",
    "doctor": "The doctor",
    "suite": "The test suite on a GPU",
}
HEAD = """\
<!-- `make figures` writes this page from benchmarks/results/*.jsonl. Do not edit it. -->
# Figures

Every figure was measured on the machine that is named below its table, with the command that is named there
([how figures are measured](comparison.md#how-figures-are-measured)). Only the newest measurement of each case is shown.

How to read the tables:

- **A peer's column** holds the ratio of ours to the peer, measured in the same run. Above 1, ours is better: faster, or
  smaller for memory. An empty cell was not measured.
- **A limit's column** (copy rate, bf16 rate, roofline) holds the share of what this machine was measured to do at best.
- **The column of the frozen forward + dX** holds multiples of it: 1.2 x is 20 % longer than the frozen model alone takes for a
  forward and the gradient to its input. Nearer to 1 is better.
- **A budget's column** holds what the project allows itself, not what a peer does.
- **Counts** (host syncs), and differences of log-probabilities, are ours and theirs. They have no ratio.
- **Columns of memory by phase** (allocated, predicted, a limit) hold GiB. Ours is what torch's allocator reserved.
- **Bold** marks a figure that misses its gate. A gate is the least that the project accepts; `make gates` lists
  those that fall short or were never measured.
- "with fp32 accumulators" adds 4 bytes per parameter to the peer's memory. Ours holds such a sum of gradients, the peer does
  not.
"""


NO_PICTURES: Mapping[str, str] = {}


def name_of(peer: str) -> str:
    short = peer.removesuffix(ACCUMULATORS)
    name = NAMES.get(short, short)
    return name if short == peer else f"{name}, with fp32 accumulators"


def is_peer(line: Line) -> bool:
    """Whether the line is beside something that a user could run instead, not beside a limit, a budget or ourselves."""
    short = line.peer_name.removesuffix(ACCUMULATORS)
    return short not in (*LIMITS, *MEMORY, *OURSELVES, FLOOR, BUDGET) and line.unit not in COUNTS


def page(lines: Sequence[Line], pictures: Mapping[str, str] = NO_PICTURES, missing: Sequence[Wanted] = ()) -> str:
    """The whole page, from the newest line of each case, and what is drawn of the GPU with the most of them, by bench.

    missing: what is asked for, and no line has measured."""
    if not lines:
        return HEAD + "\nNo figures yet: `make bench ARGS=kernels` on a GPU measures the first.\n"
    machines: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        machines.setdefault(line.gpu, {}).setdefault(line.bench, []).append(line)
    order = sorted(machines, key=lambda gpu: -sum(map(len, machines[gpu].values())))
    named = {gpu: f", {gpu}" if gpu != order[0] else "" for gpu in order}  # links to the first one's sections stay
    short = [_shortfalls([line for line in lines if line.gpu == gpu], named[gpu]) for gpu in order]
    sections = [
        _section(bench, group, named[gpu], "" if named[gpu] else pictures.get(bench, ""))
        for gpu in order
        for bench, group in machines[gpu].items()
    ]
    unnamed = [f"Sections that name no GPU are those of the {order[0]}.\n"] if len(order) > 1 else []
    all_in_one = [text for text in [beside.table([line for line in lines if line.gpu == order[0]])] if text]
    return "\n".join([HEAD, *unnamed, *all_in_one, *short, *_unmeasured(missing), *sections])


def _unmeasured(missing: Sequence[Wanted]) -> list[str]:
    if not missing:
        return []
    head = [
        "## Asked for and not measured",
        "",
        "No line is held to these gates: they were never measured, or last beside an older goal.",
        "",
        "| case | beside | machine | `gpubound bench` |",
        "|---|---|---|---|",
    ]
    rows = [f"| {one.bench}: {one.case} | {name_of(one.peer)} | {one.machine} | `{one.command}` |" for one in missing]
    return ["\n".join([*head, *rows, ""])]


def _shortfalls(lines: Sequence[Line], where: str) -> str:
    """Missed gates, then peers that are ahead although no gate says they must not be."""
    missed = [line for line in lines if line.short]
    ahead = [line for line in lines if is_peer(line) and line.ratio < 1 and not line.short]
    gated = sum(line.gate is not None for line in lines)
    text = [f"## Where it falls short{where}\n\n{gated - len(missed)} of {gated} gates hold.", ""]
    if missed:
        text += ["| missed gate | ours | beside | measured | gate |", "|---|---|---|---|---|", *map(_missed, missed), ""]
    if ahead:
        text += [
            "| a peer is ahead (no gate) | ours | theirs | peer | ratio |",
            "|---|---|---|---|---|",
            *map(_ahead, ahead),
            "",
        ]
    return "\n".join(text)


def _missed(line: Line) -> str:
    what = f"{line.bench}: {line.case}"
    if line.peer_name == BUDGET:
        return f"| {what} | {figure(line.ours, line.unit)} | budget | {figure(line.ours, line.unit)} | {_allowed(line)} |"
    return f"| {what} | {figure(line.ours, line.unit)} | {name_of(line.peer_name)} | {_share(line)} | {_wanted(line)} |"


def _ahead(line: Line) -> str:
    ours, theirs = figure(line.ours, line.unit), figure(line.peer, line.unit)
    return f"| {line.bench}: {line.case} | {ours} | {theirs} | {name_of(line.peer_name)} | {line.ratio:.2f} |"


def _section(bench: str, lines: list[Line], where: str, picture: str) -> str:
    text = [f"## {TITLES.get(bench, bench)}{where}", "", *([picture] if picture else [])]
    for unit in dict.fromkeys(line.unit for line in lines):
        text += _table(unit, [line for line in lines if line.unit == unit])
    return "\n".join([*text, *_sources(lines), ""])


def _table(unit: str, lines: list[Line]) -> list[str]:
    """A row per case and a column per peer."""
    peers = list(dict.fromkeys(line.peer_name for line in lines))
    cases: dict[str, dict[str, Line]] = {}
    for line in lines:
        cases.setdefault(line.case, {})[line.peer_name] = line
    heads = " | ".join(name_of(peer) for peer in peers)
    rows = [f"| {UNITS.get(unit, 'Time')} | ours | {heads} |", "|" + "---|" * (len(peers) + 2)]
    for case, by_peer in cases.items():
        ours = figure(max(by_peer.values(), key=lambda line: line.date).ours, unit)
        rows.append(f"| {case} | {ours} | {' | '.join(_cell(by_peer.get(peer)) for peer in peers)} |")
    return [*rows, ""]


def _cell(line: Line | None) -> str:
    if line is None:
        return ""
    if line.peer_name == BUDGET:
        if line.ratio >= 1:
            return _allowed(line)
        return f"**{_allowed(line)}**" + ("" if line.short else " (no gate)")
    if line.peer_name in MEMORY:
        words = figure(line.peer, line.unit)
        return f"**{words}**" if line.short else words
    words = _share(line)
    return f"**{words}** (gate {_wanted(line)})" if line.short else words


def _allowed(line: Line) -> str:
    """A budget in its own unit. Its gate is on the ratio: 1 allows the budget, 1.2 asks for that much more."""
    least = line.unit in ("tok/s", "steps/s", "%", "GB/s", "TFLOP/s")
    return f"at {'least' if least else 'most'} {figure(line.peer, line.unit)}"


def _share(line: Line) -> str:
    if line.unit in COUNTS:
        return figure(line.peer, line.unit)
    if line.peer_name in LIMITS:
        return f"{line.ratio:.0%}"
    return f"{line.ratio:.3f}" if line.short and line.share(line.ratio) == _wanted(line) else line.share(line.ratio)


def _wanted(line: Line) -> str:
    assert line.gate is not None
    return f"{line.gate:.0%}" if line.peer_name in LIMITS else line.share(line.gate)


def _sources(lines: list[Line]) -> list[str]:
    """Every run that a figure is from, the newest first: a table is rarely measured in one go."""
    told = [
        f"- {line.gpu}, torch {line.torch}, triton {line.triton}, {line.date[:10]}, commit {line.commit}: `{line.command}`"
        for line in sorted(lines, key=lambda line: line.date, reverse=True)
    ]
    return list(dict.fromkeys(told))
