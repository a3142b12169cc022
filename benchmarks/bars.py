"""The picture of README: bars of measured speed, ours beside its peers, as two SVG files, for a light and for a dark page.

A bar's length is its share of our speed in the run that measured both; the number beside it is what that contender did.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .gates import figure
from .results import MORE_IS_BETTER, Line
from .svg import THEMES, file, text
from .tables import is_peer, name_of

TRAINER = "350m seq 1024 micro 16 Trainer bf16 autocast"

# Title, bench, case. What was not measured is not drawn.
PANELS = (
    ("Training, 350M parameters, 16 x 1,024 tokens a step", "train", "350m"),
    ("Training, launch-bound: 135M parameters, 1 x 1,024 tokens a step", "train", "135m"),
    ("LoRA of rank 16, 1B parameters, 8 x 1,024 tokens a step", "lora", "1b"),
    ("Hugging Face Trainer, 350M parameters, and with gb.place(model)", "trainer", TRAINER),
    ("Decoding, 1B parameters, batch 1", "decode", "1b batch 1"),
    ("Decoding, 8B parameters, batch 1", "decode", "8b batch 1"),
)


WIDTH, NAMES, LONGEST = 890, 250, 350  # the picture, the column of names, our bar, in pixels
SAME = 0.05  # two runs in which our speed differs by no more than this share of it tell the same
TITLE, ROW, BAR, GAP = 30, 24, 16, 14  # heights: a panel's title, a row, its bar, the space behind a panel


@dataclass(frozen=True)
class Bar:
    name: str
    share: float  # of our speed
    words: str
    ours: bool = False


def panels(lines: Sequence[Line]) -> list[tuple[str, list[Bar]]]:
    """The panels that `lines`, the newest of one GPU, can fill."""
    found = []
    for title, bench, case in PANELS:
        beside = [line for line in lines if (line.bench, line.case) == (bench, case) and is_peer(line) and _is_speed(line)]
        if beside:
            found.append((title, contenders(beside)))
    return found


def _is_speed(line: Line) -> bool:
    return line.unit in MORE_IS_BETTER - {"%"}


def contenders(beside: Sequence[Line]) -> list[Bar]:
    """Ours and its peers in one case."""
    newest = max(beside, key=lambda line: line.date)
    bars = [Bar("gpubound", 1.0, figure(newest.ours, newest.unit), ours=True)]
    for line in sorted(beside, key=lambda line: line.ratio):
        words = f"{figure(line.peer, line.unit)}  ({_ours(line, newest)}: {line.ratio:.2f} x)"
        bars.append(Bar(name_of(line.peer_name), 1 / line.ratio, words))
    return bars


def _ours(line: Line, newest: Line) -> str:
    """Whose ratio it is: with our number of that run, where the one beside our bar is another."""
    same = abs(line.ours / newest.ours - 1) <= SAME
    return "gpubound" if same else f"gpubound {figure(line.ours, line.unit).split()[0]}"


def described(found: Sequence[tuple[str, list[Bar]]]) -> str:
    """The same for readers who do not see the picture."""
    return " ".join(f"{title}: {'; '.join(f'{bar.name} {bar.words}' for bar in bars)}." for title, bars in found)


def picture(found: Sequence[tuple[str, list[Bar]]], theme: str) -> str:
    """One SVG. Bars are scaled to the longest, which is ours unless a peer is faster."""
    colours, y, body = THEMES[theme], 0, []
    longest = max((bar.share for _, bars in found for bar in bars), default=1.0)
    for title, bars in found:
        body.append(text(0, y + 19, title, colours.text, bold=True))
        y += TITLE
        for bar in bars:
            long = max(2, round(LONGEST * bar.share / longest))
            body.append(text(NAMES - 10, y + 13, bar.name, colours.text, bold=bar.ours, anchor="end"))
            fill = colours.ours if bar.ours else colours.peer
            body.append(f'<rect x="{NAMES}" y="{y}" width="{long}" height="{BAR}" rx="2" fill="{fill}"/>')
            body.append(text(NAMES + long + 8, y + 13, bar.words, colours.text if bar.ours else colours.quiet, bold=bar.ours))
            y += ROW
        y += GAP
    return file(WIDTH, y, described(found), body, 13)
