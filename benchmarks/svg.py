"""What the pictures of results share: colours for a light and a dark page, words, and the SVG file around all of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape


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


def file(width: int, height: int, told: str, body: Sequence[str], letters: int) -> str:
    """`told` is for readers who do not see the picture; `letters` is their size in pixels."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font} font-size="{letters}">'
    return "\n".join([head, f"<title>{escape(told)}</title>", *body, "</svg>", ""])


def text(x: float, y: float, words: str, colour: str, bold: bool = False, anchor: str = "start") -> str:
    """`anchor`: which part of the words stands at x: start, middle or end."""
    weight = ' font-weight="600"' if bold else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.5g}" y="{y:.5g}" fill="{colour}"{weight}{where}>{escape(words)}</text>'
