"""`gpubound generate --gpus N`: several copies give the answers of one, in the order of the prompts, and go on after an end."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from gpubound import device as facts, lora
from gpubound.cli import main
from gpubound.errors import DataError
from gpubound.generate import batches, replicas
from gpubound.generate.batches import BatchGenerator, group_size, load
from gpubound.generate.options import Generate
from gpubound.generate.replicas import OrderedLines
from gpubound.models import load_hf, save_hf
from tests.messages import message

from . import by_heart
from .processes import forking

pytestmark = pytest.mark.usefixtures("one_thread")
reference, ckpt, run = by_heart.reference, by_heart.ckpt, by_heart.run  # fixtures
PROMPTS = ["the cat", "one two", "the cat sat on", "one two three four", "<|user|>hello"]


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


begin = replicas.start_replica


def begin_on_reference(*given):
    """In a copy's own process, where nothing that this one has patched is patched."""
    facts.interpreted = lambda: False
    return begin(*given)


@pytest.mark.slow
def test_two_copies_answer_as_one_and_a_broken_run_is_gone_on_with(ckpt, run, tmp_path, monkeypatch):
    monkeypatch.setattr(replicas, "start_replica", begin_on_reference)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    given = (ckpt, "--file", tmp_path / "prompts.jsonl", "--batch", "2", "--max-new-tokens", "12")
    wanted = json.loads(run(*given, "--json")[1])["sequences"]  # in this process, by no copy
    code, out, err = run(*given, "--gpus", "2")
    got = lines(out)
    assert code == 0, err
    assert [one.pop("number") for one in got] == [1, 2, 3, 4, 5] and len({one.pop("run") for one in got}) == 1
    assert got == wanted and message("cli_generate_gpus:two_copies_answer_as_one").within(err)

    file = tmp_path / "answers.jsonl"  # broken off in the third line, the fifth one there
    whole = out.splitlines(keepends=True)
    file.write_text("".join(whole[:2]) + whole[4] + whole[2][:30])
    code, out, err = run(*given, "--out", file)
    assert (code, out, file.read_text()) == (0, "", "".join(whole)) and "1 of 5" not in err and "2 of 5 prompts" in err

    code, _, err = run(*given, "--out", file, "--stop", "mat")
    assert code == 2 and "line 1 of " in err and message("cli_generate_gpus:two_copies_answer_as_one.2").within(err)


def test_several_batches_are_a_rollout(ckpt, monkeypatch):
    options = Generate(str(ckpt), batch=2, max_new_tokens=12, device="cpu", verify="none")
    generator = BatchGenerator(options, load(options, "cpu"), PROMPTS)
    wanted = []
    for first in range(0, len(PROMPTS), 2):
        run = generator.start(first)
        for _ in run.play():
            pass
        wanted += generator.as_json(first, run.sequences)
    assert group_size(options, len(PROMPTS)) == 2 and group_size(options, 10_000) == 16
    monkeypatch.setattr(batches, "GROUPS", 1)
    assert group_size(options, len(PROMPTS)) == 4
    assert generator.answer(0) + generator.answer(4) == wanted


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_copies_on_two_gpus_answer_as_one_on_the_cpu(ckpt, run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    given = (ckpt, "--file", tmp_path / "prompts.jsonl", "--batch", "2", "--max-new-tokens", "12")
    wanted = json.loads(run(*given, "--json")[1])["sequences"]
    code, out, err = run(*given, "--gpus", "2", device="auto")
    assert code == 0 and message("cli_generate_gpus:copies_on_two_gpus_answe").within(err), err
    assert [(one["number"], one["tokens"], one["text"]) for one in lines(out)] == [
        (number, one["tokens"], one["text"]) for number, one in enumerate(wanted, 1)
    ]


def test_answers_of_the_model_that_lay_there_before_are_not_gone_on_with(ckpt, run, tmp_path, monkeypatch):
    """A run is trained further and exported again: the folder keeps its name."""
    monkeypatch.setattr(replicas, "start_replica", begin_on_reference)
    shutil.copytree(ckpt, tmp_path / "model")
    given = (tmp_path / "model", "--prompt", "the cat", "--max-new-tokens", "2", "--out", tmp_path / "answers.jsonl")
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
    assert code == 2 and message("cli_generate_gpus:answers_of_the_model_tha").within(err)


def test_an_adapters_base_is_a_part_of_the_model(ckpt, tmp_path):
    """It was left out: one that was trained further went on with the answers of the one before."""
    shutil.copytree(ckpt, tmp_path / "base")
    model = load_hf(tmp_path / "base")
    lora.add(model, 2)
    lora.save(model, tmp_path / "adapter")
    options = Generate(str(tmp_path / "adapter"))
    before = replicas.fingerprint(options)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    lora.remove(model)
    assert replicas.fingerprint(options) == before
    save_hf(model, tmp_path / "base", overwrite=True)
    assert replicas.fingerprint(options) != before


@pytest.mark.parametrize("text", ['{"model_type": "llama"}', "notes", '{"number": 1, "pro\n'], ids=["json", "text", "line"])
def test_a_file_of_somebody_elses_is_not_touched(tmp_path, text):
    """Also one without a newline: half an answer is taken off, and nothing else."""
    file = tmp_path / "kept"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        OrderedLines(str(file), PROMPTS, 1, "mark")
    assert str(error.value) == message("cli_generate_gpus:a_file_of_somebody_elses", file)
    assert file.read_text() == text


def test_one_process_writes_a_file_of_answers(tmp_path):
    file = tmp_path / "answers.jsonl"
    first = OrderedLines(str(file), PROMPTS, 1, "mark")
    first.put(0, [{"prompt": PROMPTS[0]}])
    with pytest.raises(ValueError) as error:
        OrderedLines(str(file), PROMPTS, 1, "mark")
    assert str(error.value) == message("cli_generate_gpus:one_process_writes_a_fil", file)
    first.close()
    again = OrderedLines(str(file), PROMPTS, 1, "mark")
    assert [again.answered(number) for number in (0, 1)] == [True, False]
    again.close()


def test_answers_go_to_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place, said in (
        ("", "is a folder, wanted"),
        ("pipe", "is a named pipe, wanted"),
        ("none/file", "cannot be written: No such"),
    ):
        with pytest.raises(DataError, match=said):  # and no hang
            OrderedLines(str(tmp_path / place), PROMPTS, 1, "mark")


def test_a_disk_that_is_full_under_the_answers(ckpt, run, tmp_path, monkeypatch):
    def full(lines, number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(OrderedLines, "_write", full)
    monkeypatch.setattr(replicas, "answers", lambda *given: (yield 0, [{"tokens": []}] * len(PROMPTS)))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    code, _, err = run(ckpt, "--file", tmp_path / "prompts.txt", "-o", tmp_path / "answers.jsonl")
    assert code == 2 and err.splitlines()[-1] == (
        message("cli_generate_gpus:a_disk_that_is_full_unde", tmp_path / "answers.jsonl")
    )


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_answer_as_one(ckpt, capsys):
    given = ["generate", str(ckpt), "--batch", "1", "--max-new-tokens", "12"]
    given += [word for text in PROMPTS for word in ("--prompt", text)]
    assert main([*given, "--gpus", "1"]) == 0
    one = capsys.readouterr().out
    assert main([*given, "--gpus", "2"]) == 0 and capsys.readouterr().out == one


def begin_deadly(number, options, prompts, devices):
    """A copy without a model, which one prompt ends."""

    def work(first):
        if prompts[first] == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"prompt": prompts[first], "tokens": [first], "text": prompts[first].upper()}]

    return work


def begin_harmless(number, options, prompts, devices):
    return lambda first: [{"prompt": prompts[first], "tokens": [first], "text": prompts[first].upper()}]


def test_prompts_that_nobody_answers_are_named_and_answered_later(ckpt, run, monkeypatch, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\ndeadly\nfour\n")
    given = (ckpt, "--file", tmp_path / "prompts.txt", "--batch", "1", "--gpus", "1", "--out", tmp_path / "answers.jsonl")
    monkeypatch.setattr(replicas, "start_replica", begin_deadly)
    code, _, err = run(*given)
    assert code == 2 and err.endswith(
        "gpubound generate: not answered: prompt 3, prompt 4, because a replica ended; with --out FILE, the same command "
        "answers what is missing.\n"
    )
    assert [one["text"] for one in lines((tmp_path / "answers.jsonl").read_text())] == ["ONE", "TWO"]
    monkeypatch.setattr(replicas, "start_replica", begin_harmless)
    code, _, err = run(*given[:-3], "3", *given[-2:])
    there = lines((tmp_path / "answers.jsonl").read_text())
    assert code == 0 and message("cli_generate_gpus:prompts_that_nobody_answ").within(err)
    assert [(one["number"], one["text"]) for one in there] == [(1, "ONE"), (2, "TWO"), (3, "DEADLY"), (4, "FOUR")]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--json",), "json: --gpus and --out write a line of JSON for each sequence; leave --json out."),
        (("--device", "cuda:1"), "gpus: got 2 and --device cuda:1, a single one; leave --device out."),
    ],
)
def test_what_makes_no_sense_is_refused(ckpt, capsys, options, sentence):
    assert main(["generate", str(ckpt), "--prompt", "a", "--gpus", "2", *options]) == 2
    assert capsys.readouterr().err == f"gpubound generate: {sentence}\n"


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"text": "no"}', """'{"text": "no"}' has no prompt; write {"prompt": "..."}, or a text in quotes."""),
        ('{"prompt": ""}', "the prompt is empty; give it at least one character to go on from, or leave the line out."),
        ('"\\ud800"', "is not a text in UTF-8 (at character 1); convert it first."),
        ("[" * 100_000, " is not JSON ("),
    ],
    ids=["none", "empty", "half a character", "deep"],
)
def test_a_line_without_a_prompt_is_refused_by_its_number(ckpt, run, tmp_path, line, said):
    """One that was nested deep had ended in a traceback."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n\n{line}\n')
    code, _, err = run(ckpt, "--file", file)
    assert code == 2 and err.startswith(f"gpubound generate: {file}:3: ") and said in err and "Traceback" not in err


# --- copies that end ---


def begin_wrong(number):
    raise ValueError(f"copy {number} has no model")


def test_an_error_of_a_copy_is_ours():
    """Other processes of the caller, such as those of a loader, go on."""
    other = multiprocessing.get_context("forkserver").Process(target=signal.pause)
    other.start()
    with pytest.raises(ValueError, match="copy 0 has no model"):
        list(replicas.answers([5], 1, begin_wrong))
    assert other.is_alive()
    other.kill()
    other.join()


def begin_pausing(number, folder):
    def work(first):
        (folder / "copy").write_text(str(os.getpid()))
        signal.pause()

    return work


def ask(folder):
    list(replicas.answers([0], 1, begin_pausing, folder))


@pytest.mark.slow
def test_a_copy_ends_with_the_process_that_began_it(tmp_path):
    asking = forking().Process(target=ask, args=(tmp_path,))
    asking.start()
    copy = tmp_path / "copy"
    while not copy.exists() or not copy.read_text():
        assert asking.is_alive()
        time.sleep(0.05)
    asking.kill()
    asking.join()
    while Path("/proc", copy.read_text()).exists():  # the suite's limit ends a test that waits for ever
        time.sleep(0.05)
