"""`gpubound init`: each config is accepted as it is, and trains."""

import dataclasses
import json

import pytest
import yaml

from gpubound.cli import main, rl
from gpubound.cli.init import CONFIGS
from gpubound.cli.train_options import from_file, override_length

from . import tiny_recipe
from .train.runs import CHATS, texts

pytestmark = pytest.mark.usefixtures("one_thread")
base = tiny_recipe.base  # a fixture


def written(kind, folder, capsys):
    assert main(["init", kind]) == 0
    path = folder / f"{kind}.yaml"
    path.write_text(capsys.readouterr().out)
    return path


def test_the_help_has_a_line_for_each_kind(capsys):
    assert main(["init", "--help"]) == 0
    begins = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [word for word in begins if word in CONFIGS] == list(CONFIGS)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_key_of_a_config_is_known(kind, tmp_path, capsys):
    """The ones in comments, too."""
    path, read = written(kind, tmp_path, capsys), rl.from_file if kind == "rl" else from_file
    made = read(str(path)).recipe()
    assert made.out == f"runs/{kind}" and max(map(len, path.read_text().splitlines())) <= 130
    for line in path.read_text().splitlines():
        name, colon, value = line.removeprefix("# ").partition(":")
        if line.startswith("# ") and colon and name.isidentifier():
            rest = {key: own for key, own in yaml.safe_load(path.read_text()).items() if key not in (name, "validation")}
            (tmp_path / "one.yaml").write_text(yaml.safe_dump(rest) + f"{name}:{value}\n")
            assert getattr(read(str(tmp_path / "one.yaml")), name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "rl"])  # tests/rl has that
def test_a_config_trains(kind, base, tmp_path, monkeypatch, capsys):
    path = written(kind, tmp_path, capsys)
    path.write_text(path.read_text().replace("path/to/teacher", base))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "book.txt").write_text("\n".join(texts()))
    labelled = [{"text": chat[0]["content"], "label": n % 2} for n, chat in enumerate(CHATS)]
    pairs = [{"prompt": chat[0]["content"], "chosen": chat[1]["content"], "rejected": "no"} for chat in CHATS]
    matches = [{"query": chat[0]["content"], "positive": chat[1]["content"]} for chat in CHATS]
    data = {"chats": [{"messages": chat} for chat in CHATS], "preferences": pairs, "reviews": labelled, "matches": matches}
    for name, rows in data.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["--seq", "128", "--micro-batch", "2", "--steps", "2", "--device", "cpu", "--quiet", "--json"]
    model = ["--model", "tiny", "--vocabulary", "300"] if kind == "pretrain" else ["--model", base]
    assert main(["train", str(path), *model, *small]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finished"] and answer["last"]["step"] == 2 and not answer["failed"]


def test_an_option_is_in_place_of_the_other_key_of_a_config(tmp_path, capsys):
    default = from_file(str(written("sft", tmp_path, capsys)))
    given = override_length(dataclasses.replace(default, eval_every=5, steps=7), default)
    assert (given.evals_per_epoch, given.epochs, given.saves_per_epoch) == (0, None, 2.0)
    assert given.recipe().eval_every == 5
