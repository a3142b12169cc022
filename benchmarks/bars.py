"""The picture of README: bars of measured speed, ours beside its peers, as two SVG files, for a light and for a dark page.

A bar's length is its share of our speed in the run that measured both; the number beside it is what that contender did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .gates import figure
from .results import MORE_IS_BETTER, Line
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


@dataclass(frozen=True)
class Colours:
    text: str
    quiet: str
    ours: str
    peer: str


THEMES = {
    "light": Colours(text="#1f2328", quiet="#59636e", ours="#0969da", peer="#afb8c1"),
    "dark": Colours(text="#f0f6fc", quiet="#9198a1", ours="#4493f8", peer="#656c76"),
}

WIDTH, NAMES, LONGEST = 860, 250, 350  # the picture, the column of names, our bar, in pixels
SAME = 0.05  # of our speed, by which runs differ that say one thing
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
            found.append((title, _bars(beside)))
    return found


def _is_speed(line: Line) -> bool:
    return line.unit in MORE_IS_BETTER - {"%"}


def _bars(beside: list[Line]) -> list[Bar]:
    newest = max(beside, key=lambda line: line.date)
    peers = [
        Bar(name_of(line.peer_name), 1 / line.ratio, f"{figure(line.peer, line.unit)}  (gpubound{_then(line, newest)})")
        for line in sorted(beside, key=lambda line: line.ratio)
    ]
    return [Bar("gpubound", 1.0, figure(newest.ours, newest.unit), ours=True), *peers]


def _then(line: Line, newest: Line) -> str:
    """The ratio, and with it ours of that run where it does not fit the number beside our bar."""
    same = abs(line.ours / newest.ours - 1) <= SAME
    return f"{'' if same else f' {figure(line.ours, line.unit)} then'}: {line.ratio:.2f} x"


def described(found: Sequence[tuple[str, list[Bar]]]) -> str:
    """The same for readers who do not see the picture."""
    return " ".join(f"{title}: {'; '.join(f'{bar.name} {bar.words}' for bar in bars)}." for title, bars in found)


def picture(found: Sequence[tuple[str, list[Bar]]], theme: str) -> str:
    """One SVG. Bars are scaled to the longest, which is ours unless a peer is faster."""
    colours, y, body = THEMES[theme], 0, []
    longest = max((bar.share for _, bars in found for bar in bars), default=1.0)
    for title, bars in found:
        body.append(_text(0, y + 19, title, colours.text, bold=True))
        y += TITLE
        for bar in bars:
            long = max(2, round(LONGEST * bar.share / longest))
            body.append(_text(NAMES - 10, y + 13, bar.name, colours.text, bold=bar.ours, end=True))
            fill = colours.ours if bar.ours else colours.peer
            body.append(f'<rect x="{NAMES}" y="{y}" width="{long}" height="{BAR}" rx="2" fill="{fill}"/>')
            body.append(_text(NAMES + long + 8, y + 13, bar.words, colours.text if bar.ours else colours.quiet, bold=bar.ours))
            y += ROW
        y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" role="img"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13"'
    return "\n".join([f"{head} {font}>", f"<title>{escape(described(found))}</title>", *body, "</svg>", ""])


def _text(x: int, y: int, words: str, colour: str, bold: bool = False, end: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x}" y="{y}" fill="{colour}"{weight}{anchor}>{escape(words)}</text>'
