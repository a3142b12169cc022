"""The example writes chats and preferences that a corpus is built from."""

import runpy
from pathlib import Path

from gpubound.data.texts import Texts

EXAMPLE = Path(__file__).parents[2] / "examples" / "docstring_chats.py"


def test_docstring_chats(tmp_path, monkeypatch, capsys):
    library = tmp_path / "library"
    library.mkdir()
    for module in "abcdefghij":
        (library / f"{module}.py").write_text(
            f'def of_{module}():\n    """Return {module}."""\n\n\ndef twice():\n    """."""\n'
        )
    script = runpy.run_path(str(EXAMPLE))
    monkeypatch.setattr(script["sysconfig"], "get_paths", lambda: {"stdlib": str(library)})
    script["main"](tmp_path / "chats")
    assert capsys.readouterr().out == "9 chats to train on, 1 held out, 9 preferences, 10 modules\n"
    chats = list(Texts(tmp_path / "chats/train.jsonl"))
    turns = [[message["content"] for message in chat.messages] for chat in chats]
    assert len(turns) == 9 and all(question.endswith(f"is of_{answer}?") for question, answer in turns)
    pairs = list(Texts(tmp_path / "chats/preferences.jsonl"))
    assert len(pairs) == 9 and not any("twice" in str(pair) for pair in pairs)
