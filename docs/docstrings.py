"""Our docstrings name arguments in aligned columns, as they read best in a terminal. Here such columns become Markdown lists,
and doctests become blocks of code."""

import re

import griffe

ENTRY = re.compile(r"(?P<name>`?[\w.*]+(?:\([\w, .*=]*\))?(?:, [\w.*]+)*`?)(?: {2,}|: +)(?P<text>\S.*)")


class Lists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", text))


def _paragraph(part: str) -> str:
    """A list if the first line is an entry in columns and every other is one too, or goes on with the one before."""
    lines = part.splitlines()
    if part.startswith(">>>"):
        return f"```pycon\n{part}\n```"
    if not lines or lines[0].startswith((" ", "-", "|", ">")) or not re.match(r"\S+(?:, \S+)* {2,}\S", lines[0]):
        return part
    items: list[str] = []
    for line in lines:
        entry = ENTRY.fullmatch(line)
        if line.startswith(" "):
            items[-1] += " " + line.strip()
        elif entry and re.match(r"\S+(?:, \S+)* {2,}\S", line):
            items.append(f"- **`{entry['name'].strip('`')}`** {entry['text']}")
        else:
            return part
    return "\n".join(items)
