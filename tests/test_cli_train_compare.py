"""`gpubound train --compare`: variants on the same tokens, what their difference shows, and what is refused."""

import json
import signal

import pytest

from gpubound.cli import main
from gpubound.monitor import live
from tests.messages import message, same_texts

from . import tiny_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
corpus, config = tiny_recipe.corpus, tiny_recipe.config  # fixtures


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_variants_read_the_same_tokens_and_are_single_runs(config, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", str(config), "--compare", "lr=3e-3,lr=1e-6,clip=1e-9", "--seeds", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    fast, slow, still = answer["variants"]
    assert [row["name"] for row in (fast, slow, still)] == ["lr=3e-3", "lr=1e-6", "clip=1e-9"]
    begin = [losses(out / name / f"seed-{seed}")[0] for seed in (0, 1) for name in ("lr=3e-3", "lr=1e-6", "clip=1e-9")]
    assert begin[:3] == pytest.approx([begin[0]] * 3) and begin[3:] == pytest.approx([begin[3]] * 3), "one seed, one row"
    assert abs(begin[0] - begin[3]) > 1e-4, "and other seeds begin elsewhere"
    assert json.loads((out / "comparison.json").read_text())["variants"] == answer["variants"]
    assert main(["train", str(config), "--lr", "1e-6", "--seed", "1", "--out", str(tmp_path / "alone"), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert slow["runs"][1]["held_out"] == pytest.approx(alone["last"]["held_out"], rel=1e-5)
    assert fast["held_out"] < slow["held_out"] - 0.1 and slow["difference"] == pytest.approx(
        slow["held_out"] - fast["held_out"], abs=1e-6
    )
    page = (out / "report.html").read_text()
    assert "Beside each other" in page and "lr=1e-6 seed 1" in page and answer["sentences"][0] in page


@pytest.mark.slow
def test_what_is_done_is_not_trained_again(config, tmp_path, capsys, monkeypatch):
    """Interrupted in the second run: a start with --resume ends that one, and leaves the first as it is."""
    read, count = live.Gauges.read, 0

    def interrupted(self):
        nonlocal count
        count += 1
        if count == 8:
            signal.raise_signal(signal.SIGINT)
        return read(self)

    monkeypatch.setattr(live.Gauges, "read", interrupted)
    command = ["train", str(config), "--compare", "lr=3e-3,lr=1e-4"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert not said.out and said.err.splitlines()[-1].endswith("--compare lr=3e-3,lr=1e-4 --resume")
    first = tmp_path / "run" / "lr=3e-3" / "seed-0"
    before = (first / "run.json").read_text()
    assert main(command) == 2 and message("cli_train_compare:what_is_done_is_not_trai").within(capsys.readouterr().err)
    assert main([*command, "--resume"]) == 0
    said = capsys.readouterr()
    assert (
        message("cli_train_compare:what_is_done_is_not_trai.2").within(said.out)
        and "lr=3e-3 seed 0: trained before" in said.err
    )
    assert (first / "run.json").read_text() == before
    assert len(losses(tmp_path / "run" / "lr=1e-4" / "seed-0")) == 6
    assert main([*command, "--resume", "--seed", "7"]) == 0, "another seed has runs of its own"


@pytest.mark.slow
def test_variants_named_in_the_file(config, tmp_path, capsys):
    config.write_text(config.read_text() + "compare:\n  small: {}\n  wide: {model: 10m-tiny, lr: 1e-3}\nseeds: 1\n")
    assert main(["train", str(config), "--json", "--steps", "2"]) == 0
    small, wide = json.loads(capsys.readouterr().out)["variants"]
    about = json.loads((tmp_path / "run" / "wide" / "seed-0" / "run.json").read_text())
    assert about["config"]["model"] == "10m-tiny" and about["config"]["lr"] == 1e-3
    assert small["parameters"] == 94_528 != wide["parameters"]


@pytest.mark.slow
def test_parts_of_a_model_are_variants(config, tmp_path, capsys):
    command = ["train", str(config), "--steps", "2", "--model", "richards-tiny", "--compare", "swiglu,moe,rg_lru+moe"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["variants"]
    sizes = {row["name"]: row["parameters"] for row in found}
    about = json.loads((tmp_path / "run" / "rg_lru+moe" / "seed-0" / "run.json").read_text())
    assert about["config"]["model"] == "richards-tiny+rg_lru+moe" and "rg_lru" in about["placement"]
    recurrent = 4 * 64 * 64 + 4 * 64 - 2 * 64 * (64 + 32)  # four matrices, three biases and a decay; q and o, k and v
    assert sizes["rg_lru+moe"] - sizes["moe"] == 2 * recurrent and sizes["swiglu"] < sizes["moe"]


@pytest.mark.slow
def test_a_run_that_diverged_is_left_out_and_fails_the_command(config, tmp_path, capsys):
    config.write_text(config.read_text() + "compare: {sound: {}, wild: {lr: 1e30, clip: 1e30}}\n")
    assert main(["train", str(config)]) == 1
    said = capsys.readouterr().out
    assert message("cli_train_compare:a_run_that_diverged_is_l").within(said) and "cannot be compared" in said


def test_what_is_refused(config, capsys):
    said = []
    for options in (
        ["--compare", "tiny"], ["--compare", "tiny,steps=3"], ["--compare", "tiny,lrr=3"], ["--compare", "tiny,seq=010"],
        ["--compare", "tiny,lr=-1"], ["--compare", "tiny,11m"],
        ["--model", "richards-tiny", "--compare", "softmax,moe+swiglu"], ["--compare", "tiny,10m", "--seeds", "99"],
        ["--compare", "tiny,10m", "--export", "hf"], ["--seeds", "3"],
        ["--compare", "tiny,10m", "--patience", "2", "--eval-every", "2"],
    ):  # fmt: skip
        assert main(["train", str(config), *options]) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    same_texts("cli_train_compare:what_is_refused", said)


def test_parts_that_do_not_go_together_are_refused_before_training(config, tmp_path, capsys):
    assert main(["train", str(config), "--model", "diffusion-tiny", "--compare", "softmax,rg_lru"]) == 2
    assert (
        message("cli_train_compare:parts_that_do_not_go_tog").within(capsys.readouterr().err)
        and not (tmp_path / "run" / "corpus").exists()
    )
