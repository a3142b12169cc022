"""`gpubound generate --output`: a line of JSON for each sequence, in the order of the prompts, and a file that is resumed."""

import errno
import json
import os
import shutil

import pytest
import torch

from gpubound import lora
from gpubound.cli import main
from gpubound.errors import DataError
from gpubound.generate import answers
from gpubound.generate.answers import open_answers
from gpubound.generate.options import Generate
from gpubound.models import load_hf, save_hf
from tests.messages import message

from . import by_heart

pytestmark = pytest.mark.usefixtures("one_thread")
reference, ckpt, run = by_heart.reference, by_heart.ckpt, by_heart.run  # fixtures
PROMPTS = ["the cat", "one two", "the cat sat on", "one two three four", "<|user|>hello"]


def test_the_answers_are_those_of_the_json_and_an_interrupted_file_is_resumed(ckpt, run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    given = (ckpt, "--file", tmp_path / "prompts.jsonl", "--batch", "4", "--n", "2", "--max-new-tokens", "12")
    wanted = json.loads(run(*given, "--json")[1])["sequences"]
    file = tmp_path / "answers.jsonl"
    code, out, err = run(*given, "--output", file)
    assert (code, out) == (0, "") and "5 of 5 prompts answered now" in err
    whole = file.read_text()
    got = [json.loads(line) for line in whole.splitlines()]
    assert [one.pop("number") for one in got] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5] and len({one.pop("run") for one in got}) == 1
    assert got == wanted

    lines = whole.splitlines(keepends=True)
    for kept in ("", lines[0][:5], "".join(lines[:3]) + lines[3][:30], "".join(lines[:7]), whole):
        file.write_text(kept)
        assert run(*given, "--output", file)[0] == 0 and file.read_text() == whole
    assert "0 of 5 prompts" in run(*given, "--output", file)[2]

    code, _, err = run(*given, "--output", file, "--stop", "mat")
    assert code == 2 and message("cli_generate_output:other_settings").within(err)
    file.write_text("".join(lines[2:]))
    code, _, err = run(*given, "--output", file)
    assert code == 2 and "line 1 of " in err and "is not prompt 1 here" in err


def test_answers_of_another_model_in_the_same_folder_are_not_resumed(ckpt, run, tmp_path, monkeypatch):
    """A run is trained further and exported again: the folder keeps its name."""
    shutil.copytree(ckpt, tmp_path / "model")
    given = (tmp_path / "model", "--prompt", "the cat", "--max-new-tokens", "2", "--output", tmp_path / "answers.jsonl")
    assert run(*given)[0] == run(*given)[0] == 0
    (tmp_path / "model" / "gpubound.json").write_text("{}")  # says of which step it is, and changes no answer
    assert run(*given)[0] == 0
    monkeypatch.chdir(tmp_path)
    assert run("model", *given[1:])[0] == 0, "the same folder, by another path"
    model = load_hf(tmp_path / "model")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    save_hf(model, tmp_path / "model", overwrite=True)
    code, _, err = run(*given)
    assert code == 2 and message("cli_generate_output:other_settings").within(err)


def test_an_adapters_base_is_a_part_of_the_model(ckpt, tmp_path):
    """It was left out: one that was trained further went on with the answers of the one before."""
    shutil.copytree(ckpt, tmp_path / "base")
    model = load_hf(tmp_path / "base")
    lora.add(model, 2)
    lora.save(model, tmp_path / "adapter")
    options = Generate(str(tmp_path / "adapter"))
    before = answers.fingerprint(options)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    lora.remove(model)
    assert answers.fingerprint(options) == before
    save_hf(model, tmp_path / "base", overwrite=True)
    assert answers.fingerprint(options) != before


@pytest.mark.parametrize("text", ['{"model_type": "llama"}', "notes", '{"number": 1, "pro\n'], ids=["json", "text", "line"])
def test_a_file_of_another_program_is_not_touched(tmp_path, text):
    """Also one without a newline: half an answer is taken off, and nothing else."""
    file = tmp_path / "kept"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        open_answers(file, PROMPTS, 1, "mark")
    assert str(error.value) == message("cli_generate_output:another_program", file)
    assert file.read_text() == text


def test_one_process_writes_a_file_of_answers(tmp_path):
    file = tmp_path / "answers.jsonl"
    with open_answers(file, PROMPTS, 1, "mark"):
        with pytest.raises(ValueError) as error:
            open_answers(file, PROMPTS, 1, "mark")
        assert str(error.value) == message("cli_generate_output:another_process", file)
    open_answers(file, PROMPTS, 1, "mark").close()


def test_answers_go_to_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place, said in (
        ("", "is a folder, wanted"),
        ("pipe", "is a named pipe, wanted"),
        ("none/file", "cannot be written: No such"),
    ):
        with pytest.raises(DataError, match=said):  # and no hang
            open_answers(tmp_path / place, PROMPTS, 1, "mark")


def test_a_disk_that_is_full_under_the_answers(ckpt, run, tmp_path, monkeypatch):
    def full(options, device):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(answers, "load", full)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    code, _, err = run(ckpt, "--file", tmp_path / "prompts.txt", "--output", tmp_path / "answers.jsonl")
    assert code == 2 and err.splitlines()[-1] == message("cli_generate_output:full_disk", tmp_path / "answers.jsonl")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--json", "--output", "a"), "json: --output writes a line of JSON for each sequence; leave --json out."),
        (
            ("--gpus", "2"),
            "gpus: several GPUs share one model with --split; for a model on each, start a process for each with its own "
            "CUDA_VISIBLE_DEVICES and its part of the prompts.",
        ),
    ],
)
def test_options_that_exclude_each_other(ckpt, capsys, options, sentence):
    assert main(["generate", str(ckpt), "--prompt", "a", *options]) == 2
    assert capsys.readouterr().err == f"gpubound generate: {sentence}\n"


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"text": "no"}', """'{"text": "no"}' has no prompt; write {"prompt": "..."}, or a text in quotes."""),
        ('{"prompt": ""}', "the prompt is empty; give it at least one character to go on from, or leave the line out."),
        ('"\\ud800"', "is not a text in UTF-8 (at character 1); convert it first."),
        ("[" * 100_000, " is no JSON ("),
    ],
    ids=["none", "empty", "half a character", "deep"],
)
def test_a_line_without_a_prompt_is_refused_by_its_number(ckpt, run, tmp_path, line, said):
    """One that was nested deep had ended in a traceback."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n\n{line}\n')
    code, _, err = run(ckpt, "--file", file)
    assert code == 2 and err.startswith(f"gpubound generate: {file}:3: ") and said in err and "Traceback" not in err
