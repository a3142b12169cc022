"""Write chats about Python's standard library, made from its docstrings: data to fine-tune on, without a network.

python examples/docstring_chats.py FOLDER    train.jsonl and eval.jsonl, and preferences.jsonl with right and wrong answers
"""

import ast
import json
import random
import sys
import sysconfig
from pathlib import Path


def functions() -> list[tuple[str, str]]:
    """(module, name) of every public function and class at the top of a module, names of several modules left out."""
    found: dict[str, set[str]] = {}
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(parts) or any(p.startswith("_") for p in parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and ast.get_docstring(node):
                found.setdefault(node.name, set()).add(".".join(parts))
    return [(modules.pop(), name) for name, modules in sorted(found.items()) if len(modules) == 1]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pairs, draw = functions(), random.Random(0)
    modules = sorted({module for module, _ in pairs})
    draw.shuffle(pairs)
    held_out = len(pairs) // 10
    for name, part in (("eval", pairs[:held_out]), ("train", pairs[held_out:])):
        asked = [(f"In which module of Python's standard library is {f}?", module) for module, f in part]
        chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in asked]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    wrong = [draw.choice([other for other in modules if other != module]) for _, module in asked]
    rows = [{"prompt": [c[0]], "chosen": [c[1]], "rejected": [c[1] | {"content": w}]} for c, w in zip(chats, wrong)]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(pairs) - held_out} chats to train on, {held_out} held out, {len(rows)} preferences, {len(modules)} modules")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
