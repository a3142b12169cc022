"""Wording that is never right here: docstrings without a verb or a noun in front, and house phrases. Part of `make check`.

python tests/wording.py            names each place beyond wording.json, the files' allowances, which may only shrink
python tests/wording.py --update   lowers the allowances to today's counts; a higher count is refused
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_name("wording.json")

# A docstring begins with a verb ("Return", "Compute") or the noun that it returns.
OPENING = re.compile(r"(Of|Those|Who|What|Which|Whether|Whose|Where|Nothing|Nor|So|How|The same|As)\b")
# The field's words are: fix, report, shard, store, after, next to, no caller, resume, permanently, alternately, unchanged.
PHRASE = re.compile(
    r"\b(mend(s|ed|ing)?|told of|deal(s|t)? out|dealt|lies? (there|beside|behind)|behind (it|them|the|a)|nobody('s)?|in vain|"
    r"gone on with|of (its|their|our) own|whoever|by heart|for good|by turns|as it (came|lies)|let go of|comes? to nothing)\b",
    re.IGNORECASE,
)


def places(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a source file that break a rule, each with what is wrong."""
    text = path.read_text(encoding="utf-8")
    found = []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline) if PHRASE.search(text) else ()  # slow: 3 s for all files
    for token in tokens:
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            found += [(token.start[0], f"house phrase {match[0]!r}") for match in PHRASE.finditer(token.string)]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and (match := OPENING.match(docstring)):
                found.append((getattr(node, "lineno", 1), f"docstring begins with {match[0]!r}"))
    return sorted(found)


def main(arguments: list[str]) -> int:
    allowed = defaultdict(int, json.loads(ALLOWED.read_text()) if ALLOWED.exists() else {})
    counts, beyond = {}, []
    for path in sorted((ROOT / "src").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        found = places(path)
        if found:
            counts[name] = len(found)
        if len(found) > allowed[name]:
            beyond += [f"{name}:{line}: {what}" for line, what in found]
    print("\n".join(beyond), end="\n" if beyond else "")
    if beyond and ALLOWED.exists():
        print("wording: write these as PyTorch's documentation would; tests/wording.json may only shrink.")
        return 1
    if "--update" in arguments or not ALLOWED.exists():
        ALLOWED.write_text(json.dumps(counts, indent=0) + "\n")
    elif any(counts.get(name, 0) < number for name, number in allowed.items()):
        print("wording: fewer than allowed; lower the allowances with `python tests/wording.py --update`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
