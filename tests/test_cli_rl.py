"""`gpubound rl`: from a config file to an exported folder, and what it refuses."""

import json
import runpy
from pathlib import Path

import pytest
import yaml

from gpubound.cli import main, rl

from . import tiny_recipe
from .messages import same_texts

EXAMPLE = Path(__file__).parents[1] / "examples" / "rl_arithmetic"
pytestmark = pytest.mark.usefixtures("one_thread")
base = tiny_recipe.base  # a fixture


@pytest.fixture
def config(base, tmp_path, monkeypatch, capsys):
    """That of gpubound init rl, with a model and prompts."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "rl"]) == 0
    text = capsys.readouterr().out.replace("path/to/model", base)
    (tmp_path / "rl.yaml").write_text(text.replace("# eval_prompts", "eval_prompts"))
    for name in ("prompts", "eval"):
        rows = [{"prompt": f"{n} + {n} = ", "answer": 2 * n} for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "rl.yaml"


SMALL = ["--steps", "2", "--prompts-per-step", "2", "--samples", "2", "--max-new-tokens", "4", "--device", "cpu"]


@pytest.mark.slow
def test_a_run_is_resumed_by_the_config_that_it_has_recorded(config, tmp_path, capsys):
    run = tmp_path / "runs" / "rl"
    values = yaml.safe_load((tmp_path / config).read_text()) | {"clip": "none", "lr": "1e-4"}
    (tmp_path / config).write_text(yaml.safe_dump(values))
    assert main(["rl", config, *SMALL]) == 0
    Path(config).unlink()
    assert main(["rl", "--resume", "--out", str(run), "--steps", "3"]) == 0
    about = json.loads((run / "run.json").read_text())
    assert about["finished"] and (about["config"]["steps"], about["config"]["lr"], about["config"]["clip"]) == (3, 1e-4, None)
    assert main(["rl", "--resume", "--out", str(run), "--samples", "4"]) == 2
    assert "samples: got 4, and the run in" in capsys.readouterr().err


def test_a_folder_without_a_run_of_rl_is_not_resumed(tmp_path, capsys):
    errors = []
    for config in (None, {"data": "x"}, {"rewards": {}, "model": "x"}):
        if config is not None:
            (tmp_path / "run.json").write_text(json.dumps({"starts": [], "config": config}))
        assert main(["rl", "--resume", "--out", str(tmp_path)]) == 2
        errors.append(capsys.readouterr().err.splitlines()[-1])
    assert main(["train", "--resume", "--out", str(tmp_path)]) == 2
    errors.append(capsys.readouterr().err.splitlines()[-1])
    same_texts("cli_rl:not_resumed", errors, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_a_config_trains_is_resumed_and_exported(lora, config, base, tmp_path, capsys):
    (tmp_path / "rewards.py").write_text("def brevity(completions, **columns):\n    return [-len(c) for c in completions]\n")
    values = yaml.safe_load((tmp_path / config).read_text()) | {"kl": "1e-3", "lr": "1e-4"}
    values["rewards"]["rewards.py:brevity"] = 0.01
    if lora:
        values["lora"] = {"rank": 2}
    (tmp_path / config).write_text(yaml.safe_dump(values))
    assert main(["rl", config, *SMALL, "--quiet", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["finished"] and first["last"]["step"] == 2 and first["export"] is None
    assert {"reward/exact_match", "reward/brevity", "eval/brevity", "kl"} <= first["last"].keys()
    assert main(["generate", "runs/rl", "--prompt", "1 + 1 = ", "--max-new-tokens", "4", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 0, "from the checkpoint"
    more = ["--steps", "3", "--resume", "--export", "hf", "--quiet", "--json"]
    assert main(["rl", config, *SMALL, *more, *(["--merge"] if lora else [])]) == 0
    last = json.loads(capsys.readouterr().out)
    assert last["last"]["step"] == 3 and "config.json" in {file.name for file in (tmp_path / last["export"]).iterdir()}
    assert main(["report", "runs/rl", "--json"]) == 0
    assert "eval_reward" in capsys.readouterr().out


def test_names_of_trl_are_read(config, tmp_path):
    names = {"num_generations": 4, "beta": 0.04, "learning_rate": "1e-5", "num_iterations": 2, "output_dir": "runs/theirs"}
    values = yaml.safe_load((tmp_path / config).read_text())
    for ours in ("samples", "kl", "lr", "passes", "out"):
        values.pop(ours, None)
    (tmp_path / config).write_text(yaml.safe_dump(values | names))
    made = rl.from_file(config)
    assert (made.samples, made.kl, made.lr, made.passes, made.out) == (4, 0.04, 1e-5, 2, "runs/theirs")
    (tmp_path / config).write_text(yaml.safe_dump(values | {"samples": 8, "num_generations": 4}))
    with pytest.raises(ValueError, match="num_generations"):
        rl.from_file(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 0}, "samples"),
        ({"sample": 8}, "samples"),
        ({"zzzzz": 8}, "gpubound rl --help"),
        ({"rewards": {"exact": 1.0}}, "exact_match"),
        ({"rewards": {"none.py:f": 1.0}}, "none.py"),
        ({"prompts": "none.jsonl"}, "none.jsonl"),
        ({"model": "none"}, "none"),
        ({"variant": "ppo"}, "ppo"),
        ({"stop": ["two words"]}, "two words"),
        ({"rewards": [{"exact_match": 1.0}]}, "weights by name"),
        ({"lr": 10**400}, "finite"),
        ({"prompts": "."}, "is a folder"),
    ],
)
def test_mistakes_are_named_in_a_line(change, words, config, tmp_path, capsys):
    values = yaml.safe_load((tmp_path / config).read_text()) | change
    (tmp_path / config).write_text(yaml.safe_dump(values))
    assert main(["rl", config, *SMALL]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gpubound rl: ") and words in error


def test_an_export_that_cannot_be_written_is_refused_before_the_run(config, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["rl", config, *SMALL, "--export", "file"]) == 2
    assert "file" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_without_a_config_the_missing_key_is_named(capsys):
    assert main(["rl", "--device", "cpu"]) == 2
    assert "model" in capsys.readouterr().err


def test_several_gpus_are_refused(capsys):
    assert main(["rl", "--gpus", "2"]) == 2
    assert "--device cuda:<index>" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example(base, tmp_path, monkeypatch, capsys):
    """examples/rl_arithmetic as it stands, on another base, and shorter."""
    runpy.run_path(str(EXAMPLE / "prompts.py"))["main"](tmp_path / "runs" / "sums")
    files = [tmp_path / "runs" / "sums" / f"{name}.jsonl" for name in ("prompts", "eval")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    questions = [row["prompt"][0]["content"] for row in rows]
    assert len(set(questions)) == len(questions) > 1200 and {row["terms"] for row in rows} == {2, 3, 4}
    assert all(row["answer"] == eval(question.split("?")[0].removeprefix("What is ")) for question, row in zip(questions, rows))
    files[1].write_text("".join(json.dumps(row) + "\n" for row in rows[-4:]))
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    monkeypatch.chdir(tmp_path)
    config, model = "examples/rl_arithmetic/rl.yaml", ["--model", base, "--chat-template", "chatml"]
    capsys.readouterr()
    assert main(["rl", config, *model, *SMALL, "--quiet", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)["last"]
    assert {"reward/number_alone", "reward/closeness", "reward/exact_match", "eval_reward"} <= last.keys()
