"""`gpubound generate` on a tiny model that knows a few texts by heart, so that what it writes is known to the letter."""

import json
import os
import re
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch

from gpubound.cli import main
from gpubound.data import Tokenizer
from gpubound.decode.request import Generated, Generation
from gpubound.formatting import PRINTABLE
from gpubound.generate.batches import Speed, open_saved
from gpubound.measure import ceilings
from gpubound.models import load_hf, save_hf
from gpubound.train.checkpoint import Checkpoints, checkpoints
from tests.messages import message, same_texts

from . import by_heart
from .by_heart import CPU, LINE

pytestmark = pytest.mark.usefixtures("one_thread")
reference, ckpt, run = by_heart.reference, by_heart.ckpt, by_heart.run  # fixtures


# --- texts ---


def test_a_prompt_is_written_on_to_its_end(ckpt, run):
    code, out, err = run(ckpt, "--prompt", "the cat")
    assert (code, out) == (0, message("cli_generate:a_prompt_is_written_on_t"))
    ready, line = err.splitlines(keepends=True)
    assert re.fullmatch(rf"{ckpt}: 94.5k parameters, float32 on CPU \(1 threads\), plain torch, ready in [\d.]+ s\n", ready)
    tokens, _, kilobytes = re.fullmatch(LINE, line).groups()
    assert int(tokens) == 20
    # the embedding is the head too, so every weight is read; and of each place, 2 layers of 2 heads of 16 keys and values, fp32
    weights, prompt = 4 * sum(p.numel() for p in load_hf(ckpt).parameters()), len(Tokenizer.load(ckpt).encode("the cat"))
    assert float(kilobytes) == pytest.approx((weights + 512 * (prompt + 10)) / 1e3, rel=6e-3)


def test_several_prompts_keep_their_order_and_names(ckpt, run):
    code, out, _ = run(ckpt, "--prompt", "one two three four five", "--prompt", "the cat", "--echo")
    assert code == 0 and out == message("cli_generate:several_prompts_keep_the")


def test_a_length_beyond_the_positions_and_many_sequences_are_said(ckpt, run, monkeypatch):
    code, _, err = run(ckpt, "--prompt", "the cat", "--max-length", 700)
    assert code == 0 and f"max_length: got 700, and {ckpt} has 512 positions by its config" in err
    assert "positions" not in run(ckpt, "--prompt", "the cat", "--max-length", 512)[2]
    monkeypatch.setattr("gpubound.generate.batches.MANY", 2)
    assert "generate: n: 3 sequences are written at once" in run(ckpt, "--prompt", "the cat", "--n", 3)[2]


@pytest.mark.parametrize("batch", ["1", "2", "32"])
def test_a_file_a_line_a_prompt_in_any_batch(ckpt, run, tmp_path, batch):
    (tmp_path / "prompts.txt").write_text("the cat\n\none two\nthe cat sat on\n")
    code, out, err = run(ckpt, "--file", tmp_path / "prompts.txt", "--batch", batch)
    assert code == 0 and out == message("cli_generate:a_file_a_line_a_prompt_i")
    assert re.fullmatch(LINE, err.splitlines(keepends=True)[-1])[1] == str(20 + 23 + 14)


def test_a_line_of_a_file_ends_where_lines_end(ckpt, tmp_path, run):
    """Not at a form feed or at Unicode's own line separator, which a text may hold."""
    (tmp_path / "prompts.txt").write_text("the\u2028cat\nsat\x0con\r\n", newline="")
    code, out, _ = run(ckpt, "--file", tmp_path / "prompts.txt", "--max-new-tokens", 1, "--json")
    assert [one["prompt"] for one in json.loads(out)["sequences"]] == ["the\u2028cat", "sat\x0con"]
    code, _, err = run(ckpt, "--file", tmp_path / "nowhere.txt")
    assert code == 2 and message("cli_generate:a_line_of_a_file_ends_wh", tmp_path / "nowhere.txt").within(err)


def test_a_prompt_that_is_too_long_is_refused_before_any_is_written_on(ckpt, run, tmp_path):
    """It was in the second batch, so with --json what the first had written was lost. It is named as the headings name it."""
    (tmp_path / "prompts.txt").write_text(f"the cat\n{'the cat ' * 9}\n")
    code, out, err = run(ckpt, "--file", tmp_path / "prompts.txt", "--batch", 1, "--max-length", 20)
    assert (code, out) == (2, "") and err == message("cli_generate:a_prompt_that_is_too_lon")


@pytest.mark.parametrize(("name", "line"), [("prompts.txt", "the cat"), ("prompts.jsonl", '"the cat"')])
def test_a_byte_order_mark_is_no_text(ckpt, run, tmp_path, name, line):
    """It had become the first character of the prompt, and no JSON."""
    (tmp_path / name).write_text(f"{line}\n", encoding="utf-8-sig")
    assert run(ckpt, "--file", tmp_path / name)[:2] == (0, message("cli_generate:a_byte_order_mark_is_no"))


@pytest.mark.slow
def test_a_whole_file_and_stdin(ckpt, run, tmp_path):
    (tmp_path / "prompt.txt").write_text("the cat sat\n")
    assert run(ckpt, "--file", tmp_path / "prompt.txt", "--whole")[1] == message("cli_generate:a_whole_file_and_stdin")
    assert run(ckpt, stdin="the cat sat\n")[1] == message("cli_generate:a_whole_file_and_stdin.2")
    assert run(ckpt, "--file", "-", stdin="the cat sat\n\none two three four\n")[1].count("---") == 2


@pytest.mark.slow
def test_what_ends_a_text(ckpt, run):
    assert run(ckpt, "--prompt", "the cat", "--stop", " mat")[1] == " sat on the\n"
    assert run(ckpt, "--prompt", "<|user|>hello", "--stop", "<|assistant|>")[1] == "\n"
    assert run(ckpt, "--prompt", "the cat", "--max-new-tokens", "1")[2].count("1 tokens, ") == 1
    dot = Tokenizer.load(ckpt).encode(".")[0]
    assert run(ckpt, "--prompt", "the cat", "--stop-id", dot)[1] == message("cli_generate:what_ends_a_text")
    _, on, err = run(ckpt, "--prompt", "the cat", "--ignore-eos", "--special", "--max-new-tokens", "40")
    assert on.startswith(" sat on the mat and slept.<|endoftext|>") and "\n40 tokens, " in err


@pytest.mark.parametrize("k", ["1", "5", "auto"])
def test_json_says_everything(ckpt, run, k):
    code, out, _ = run(ckpt, "--prompt", "the cat", "--json", "--logprobs", "--k", k)
    found = json.loads(out)
    (sequence,) = found.pop("sequences")
    tokenizer = Tokenizer.load(ckpt)
    assert code == 0 and sequence["prompt"] == "the cat" and sequence["prompt_tokens"] == tokenizer.encode("the cat")
    assert sequence["text"] == message("cli_generate:json_says_everything") and sequence["finish"] == "stop token"
    assert tokenizer.decode(sequence["tokens"]) == message("cli_generate:json_says_everything.2")
    ids = torch.tensor(sequence["prompt_tokens"] + sequence["tokens"])
    with torch.no_grad():
        logits = load_hf(ckpt).eval()(ids[None])[0].log_softmax(-1)
    want = logits[:-1].gather(-1, ids[1:, None])[len(sequence["prompt_tokens"]) - 1 :, 0]
    torch.testing.assert_close(torch.tensor(sequence["logprobs"]), want, atol=1e-4, rtol=1e-3)
    assert (found["model"], found["tokens"], found["steps"], found["syncs"]) == (str(ckpt), 20, 20, None)
    assert found["read_bytes_per_s"] == ceilings("cpu", quick=True).read_bytes_per_s
    assert found["roofline"] == pytest.approx(
        found["bytes_a_step"] * 20 / found["read_bytes_per_s"] / found["seconds"], rel=1e-3
    )


@pytest.mark.slow
def test_a_seed_gives_the_same_draw_and_n_draws_differ(ckpt, run):
    hot = [ckpt, "--prompt", "the", "--temperature", "3", "--max-new-tokens", "12", "--json", "--n", "3"]
    first, again, other = ([s["tokens"] for s in json.loads(run(*hot, "--seed", seed)[1])["sequences"]] for seed in (1, 1, 2))
    assert first == again != other and len({tuple(tokens) for tokens in first}) == 3
    assert run(*hot[:-3], "--n", "2")[1].count("--- 1.") == 2


def test_equal_prompts_in_other_batches_are_drawn_anew(ckpt, run):
    hot = ["--prompt", "the", "--prompt", "the", "--temperature", "3", "--max-new-tokens", "12", "--json", "--batch", "1"]
    one, two = json.loads(run(ckpt, *hot)[1])["sequences"]
    assert one["tokens"] != two["tokens"]


@pytest.mark.slow
def test_speculation_writes_the_same_text(ckpt, run):
    assert run(ckpt, "--prompt", "the cat", "--speculate", "3")[:2] == (0, message("cli_generate:speculation_writes_the_s"))


@pytest.mark.slow
def test_the_model_in_another_dtype_and_without_fused_kernels(ckpt, run):
    code, out, err = run(ckpt, "--prompt", "the cat", "--dtype", "bfloat16", "--table", "--verify", "quick")
    assert (code, out) == (0, message("cli_generate:the_model_in_another_dty")) and "bfloat16 on CPU" in err
    assert message("cli_generate:the_model_in_another_dty.2").within(err) and "greedy tokens equal" in err
    code, out, err = run(ckpt, "--prompt", "the cat", "--weights", "int8", "--table")
    assert (code, out) == (0, message("cli_generate:the_model_in_another_dty.3")) and message(
        "cli_generate:the_model_in_another_dty.4"
    ).within(err)
    code, out, err = run(ckpt, "--prompt", "the cat", "--cache", "int8", "--table")
    assert (code, out) == (0, message("cli_generate:the_model_in_another_dty.5")) and message(
        "cli_generate:the_model_in_another_dty.6"
    ).within(err)
    assert "verify=False: nothing has shown" in run(ckpt, "--prompt", "the cat", "--verify", "none")[2]


def test_control_characters_do_not_reach_a_terminal():
    assert "a\x1b[2Jb\r\x07\n\t\x9b".translate(PRINTABLE) == "a\ufffd[2Jb\ufffd\ufffd\n\t\ufffd"


# --- what is opened ---


def with_generation(ckpt: Path, folder: Path, **config) -> Path:
    shutil.copytree(ckpt, folder)
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_the_models_own_sampling_is_used_and_named(ckpt, run, tmp_path):
    """Its generation_config.json was read for the end of text alone."""
    model = with_generation(ckpt, tmp_path / "m", do_sample=True, temperature=3.0, top_k=40, num_beams=3)
    ask = ("--prompt", "the cat", "--max-new-tokens", "16", "--ignore-eos", "--json")

    def tokens(folder: Path, *options: str) -> list[int]:
        return json.loads(run(folder, *ask, *options)[1])["sequences"][0]["tokens"]

    want = tokens(ckpt, "--temperature", "3", "--top-k", "40")
    assert tokens(model) == want != tokens(ckpt)
    assert tokens(model, "--temperature", "0") == tokens(ckpt)  # an option wins
    assert tokens(model, "--top-k", "5") == tokens(ckpt, "--temperature", "3", "--top-k", "5")
    _, _, err = run(model, *ask, "--top-k", "5")
    (line,) = [line for line in err.splitlines() if line.startswith("sampling: ")]
    assert "temperature 3" in line and "top_k 5" in line and "num_beams=3" in line
    assert "sampling: " not in run(ckpt, *ask)[2]


@pytest.mark.parametrize("options", [("--prompt", "the cat"), ("--chat",)])
def test_an_end_of_text_outside_the_vocabulary(ckpt, run, tmp_path, options):
    model = with_generation(ckpt, tmp_path / "m", eos_token_id=[0, 999])
    code, out, err = run(model, *options, stdin="hello\n" if options == ("--chat",) else None)
    assert (code, out) == (2, "") and "eos_token_id: got 999" in err and "--ignore-eos" in err
    if options != ("--chat",):
        assert run(model, *options, "--ignore-eos", "--max-new-tokens", "2")[0] == 0


def test_another_architecture_through_transformers(ckpt, run, tmp_path):
    from transformers import CodeGenConfig, CodeGenForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
    model = CodeGenForCausalLM(CodeGenConfig(**sizes, eos_token_id=5)).eval()
    model.save_pretrained(tmp_path / "codegen")
    tokenizer = Tokenizer.load(ckpt)
    tokenizer.save(tmp_path / "codegen")
    code, out, err = run(tmp_path / "codegen", "--prompt", "the cat", "--json", "--max-new-tokens", "8")
    ids = tokenizer.encode("the cat")
    for _ in range(8):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    got = json.loads(out)["sequences"][0]
    assert code == 0 and got["prompt_tokens"] + got["tokens"] == ids[: len(got["prompt_tokens"] + got["tokens"])]
    assert len(got["tokens"]) == 8 or got["tokens"][-1] in (0, 5)
    assert message("cli_generate:another_architecture_thr").within(err)


def test_without_transformers_other_architectures_are_refused(ckpt, run, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    Tokenizer.load(ckpt).save(tmp_path)
    monkeypatch.setattr("gpubound.models.folder.find_spec", lambda name: None)
    code, out, err = run(tmp_path, "--prompt", "x")
    assert (code, out) == (2, "") and err.endswith(
        "transformers reads it, and it is not installed: pip install 'gpubound[hf]'.\n"
    )
    assert err.startswith(f"gpubound generate: {tmp_path}: it is a 'gpt2' model beyond our own decoder: ")


def test_the_ends_that_the_models_files_name(ckpt, tmp_path):
    saved = open_saved(ckpt, CPU)
    assert saved.ends == (0,) and saved.positions == 512
    save_hf(saved.model, tmp_path)
    saved.tokenizer.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0, 9]}')
    assert open_saved(tmp_path, CPU).ends == (0, 7, 9)


def checkpoint(folder: Path, ckpt: Path, step: int, recipe=None, where=None, **average) -> None:
    """A checkpoint as a run leaves it, with the model of `ckpt`."""
    model = load_hf(ckpt)
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()} | average
    tensors["model.lm_head.weight"] = tensors["model.lm_head.weight"].clone()
    Tokenizer.load(ckpt).save(folder / "corpus")
    facts = {"recipe": recipe or {"model": str(ckpt), "seq": 32, "data": ["stdlib"], "tokenizer": None}}
    facts |= {"where": where} if where else {}
    Checkpoints(folder / "checkpoints").save(step, tensors, facts, wait=True)


def test_a_run_is_its_export_or_a_newer_checkpoint(ckpt, tmp_path):
    checkpoint(tmp_path, ckpt, 3)
    step = tmp_path / "checkpoints" / "step-00000003"
    assert open_saved(tmp_path, CPU).folder == open_saved(tmp_path / "checkpoints", CPU).folder == step
    assert open_saved(step, CPU).folder == step
    Tokenizer.load(ckpt).save(save_hf(load_hf(ckpt), tmp_path / "model"))
    assert open_saved(tmp_path, CPU).folder == step, "the export of no known step may be an interrupted one"
    checkpoints.note_export(tmp_path / "model", "run", 3, 3)
    assert open_saved(tmp_path, CPU).folder == tmp_path / "model"


@pytest.mark.parametrize("done, taken", [(2, "checkpoints/step-00000003"), (3, "model")])
def test_which_is_newer_the_steps_tell_and_no_file_s_time(ckpt, tmp_path, done, taken):
    """A copy of a run, or a restored one, has its files in any order."""
    checkpoint(tmp_path, ckpt, 3)
    Tokenizer.load(ckpt).save(save_hf(load_hf(ckpt), tmp_path / "model"))
    checkpoints.note_export(tmp_path / "model", "run", 1, done)
    for folder in ("model", "checkpoints/step-00000003"):
        for file in (tmp_path / folder).iterdir():
            os.utime(file, (1000 * (folder != taken),) * 2)  # what is taken looks older
    assert open_saved(tmp_path, CPU).folder == tmp_path / taken


def test_a_run_whose_export_is_in_its_own_folder(ckpt, tmp_path):
    checkpoint(tmp_path, ckpt, 3)
    Tokenizer.load(ckpt).save(save_hf(load_hf(ckpt), tmp_path))
    for done, taken in ((3, tmp_path), (2, tmp_path / "checkpoints" / "step-00000003")):
        checkpoints.note_export(tmp_path, "run", 1, done)
        assert open_saved(tmp_path, CPU).folder == taken


def test_an_export_whose_step_cannot_be_read(ckpt, tmp_path, run):
    checkpoint(tmp_path, ckpt, 3)
    file = save_hf(load_hf(ckpt), tmp_path / "hf") / "gpubound.json"
    file.write_text('{"done": "all"}')
    code, out, err = run(tmp_path, "--prompt", "x")
    assert (code, out) == (2, "")
    assert err == message("cli_generate:an_export_whose_step_can", file)


@pytest.mark.parametrize("lora", [{}, {"rank": 2}])
def test_a_checkpoint_whose_first_model_is_gone(ckpt, tmp_path, run, lora):
    """Nobody named that folder now, and a relative path is seen from where the command was started."""
    checkpoint(tmp_path, ckpt, 3, recipe={"model": "there/hf", "seq": 32, "data": ["stdlib"], "tokenizer": None, "lora": lora})
    code, out, err = run(tmp_path, "--prompt", "x")
    assert (code, out) == (2, "")
    assert err == message("cli_generate:a_checkpoint_whose_first", tmp_path / "checkpoints" / "step-00000003")


def test_a_checkpoint_whose_first_model_is_where_the_run_was_begun(ckpt, tmp_path, monkeypatch):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "hf").symlink_to(ckpt)
    recipe = {"model": "hf", "seq": 32, "data": ["stdlib"], "tokenizer": None}
    checkpoint(tmp_path, ckpt, 3, recipe=recipe, where=str(tmp_path / "begun"))
    monkeypatch.chdir(tmp_path)
    assert open_saved(tmp_path, CPU).folder == tmp_path / "checkpoints" / "step-00000003"


def test_of_a_checkpoint_with_an_average_the_average_speaks(ckpt, tmp_path, run):
    zeros = {f"average.{n}": torch.zeros_like(p) for n, p in load_hf(ckpt).named_parameters() if n != "lm_head.weight"}
    checkpoint(tmp_path / "plain", ckpt, 1)
    checkpoint(tmp_path / "averaged", ckpt, 1, **zeros)
    assert run(tmp_path / "plain", "--prompt", "the cat")[1] == message("cli_generate:of_a_checkpoint_with_an")
    model = open_saved(tmp_path / "averaged", CPU).model
    assert all(not p.any() for p in model.parameters()) and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_what_demo_leaves(tmp_path, run, monkeypatch, capsys):
    from gpubound.train import data

    whole = data.python_stdlib_texts
    monkeypatch.setattr(data, "python_stdlib_texts", lambda limit: whole(60_000))
    assert main(["demo", "--out", str(tmp_path / "demo"), "--steps", "3", "--device", "cpu"]) == 0
    prompt = ["--prompt", "import sys", "--max-new-tokens", "16", "--json"]
    exported = json.loads(run(tmp_path / "demo", *prompt)[1])
    kept = json.loads(run(tmp_path / "demo" / "checkpoints" / "step-00000003", *prompt)[1])
    assert exported["model"] == str(tmp_path / "demo" / "model")
    assert exported["sequences"] == kept["sequences"] and len(kept["sequences"][0]["tokens"]) > 0


# --- what is refused ---


def refused(folder: Path) -> list[list]:
    return [
        ["nowhere", "--prompt", "x"], [__file__, "--prompt", "x"], [folder, "--prompt", "x"], ["CKPT", "--prompt", ""],
        ["CKPT", "--file", "-"], ["CKPT", "--prompt", "x", "--chat"], ["CKPT", "--prompt", "x", "--whole"],
        ["CKPT", "--prompt", "x", "--system", "s"], ["CKPT", "--chat", "--n", "2"], ["CKPT", "--prompt", "x", "--logprobs"],
        ["CKPT", "--prompt", "x", "--n", "0"], ["CKPT", "--prompt", "x", "--batch", "0"],
        ["CKPT", "--prompt", "x", "--max-new-tokens", "0"], ["CKPT", "--prompt", "x", "--temperature", "-1"],
        ["CKPT", "--prompt", "x", "--temperature", "1e40"], ["CKPT", "--prompt", "x", "--max-length", "0"],
        ["CKPT", "--prompt", os.fsdecode(b"caf\xe9")], ["CKPT", "--prompt", "x", "--top-p", "0"],
        ["CKPT", "--prompt", "x", "--k", "some"], ["CKPT", "--prompt", "x", "--verify", "no"],
        ["CKPT", "--prompt", "x", "--dtype", "int8"], ["CKPT", "--prompt", "x", "--stop-id", "999"],
        ["CKPT", "--prompt", "the cat", "--max-length", "2"], ["CKPT", "--prompt", "x", "--tokenizer", "nowhere"],
    ]  # fmt: skip


def test_what_is_refused_by_its_sentence(ckpt, run, tmp_path):
    said = [run(*[ckpt if word == "CKPT" else word for word in words], stdin="") for words in refused(tmp_path)]
    assert {(code, out) for code, out, _ in said} == {(2, "")}
    same_texts("cli_generate:what_is_refused_by_its_s", [err.splitlines()[-1] for _, _, err in said], __file__, tmp_path)


def test_a_terminal_without_any_prompt(ckpt, run, monkeypatch):
    terminal = StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert run(ckpt)[2] == message("cli_generate:a_terminal_without_any_p")


def test_files_that_are_not_what_they_should_be(ckpt, run, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert run(ckpt, "--file", tmp_path / "latin")[2].startswith(
        f"gpubound generate: {tmp_path / 'latin'} is not a text in UTF-8: "
    )
    save_hf(load_hf(ckpt), tmp_path / "mute")
    assert run(tmp_path / "mute", "--prompt", "x")[2] == message("cli_generate:files_that_are_not_what", tmp_path / "mute")
    assert run(tmp_path / "mute", "--prompt", "the cat", "--tokenizer", ckpt)[1] == message(
        "cli_generate:files_that_are_not_what.2"
    )
    Tokenizer.load(ckpt).save(tmp_path / "half")
    (tmp_path / "half" / "config.json").write_text('{"model_type": "llama"}')
    assert run(tmp_path / "half", "--prompt", "x")[2] == (
        message("cli_generate:files_that_are_not_what.3", tmp_path / "half" / "config.json")
    )
    (tmp_path / "half" / "config.json").write_text("{")
    assert run(tmp_path / "half", "--prompt", "x")[2].startswith(
        f"gpubound generate: {tmp_path / 'half' / 'config.json'}: is not JSON "
    )


def test_an_unknown_option_suggests_the_near_one_and_help_has_an_example(run):
    code, _, err = run("ckpt", "--temprature", "1")
    assert code == 2 and "--temprature" in err and "'--temperature'" in err
    code, out, _ = run("--help")
    assert code == 0 and message("cli_generate:an_unknown_option_sugges").within(out)


# --- the figures of the last line ---


def test_steps_beyond_the_last_token_do_not_count_as_work():
    speed = Speed(CPU)
    speed._rate = 1e9
    sequences = [Generated([1], [2] * 20), Generated([1], [2] * 5)]
    speed.add(Generation(sequences, 2.0, 0.5, launches=5, steps=40, row_steps=25, bytes_read=40_000_000))
    assert (speed.tokens, speed.steps, speed.bytes_read) == (25, 20, 20_000_000)
    assert speed.line() == message("cli_generate_figures:steps_beyond_the_last_to")
    speed.merge(speed)
    assert speed.tokens_per_s == 12.5 and speed.first_token_s == 0.5


def test_a_launch_that_overshot_is_counted_as_far_as_it_was_wanted():
    """257 steps for 256 tokens, of which 256 are in bytes_read."""
    speed = Speed(CPU)
    speed.add(Generation([Generated([1], [2] * 256)], 2.0, 0.5, 12, 257, 256, bytes_read=256_000, wanted=256))
    assert (speed.steps, speed.bytes_read) == (256, 256_000)


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits(ckpt, capsys, monkeypatch):
    monkeypatch.undo()
    code = main(["generate", str(ckpt), "--prompt", "the cat", "--ignore-eos", "--json", "--device", "cuda"])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert code == 0 and found["syncs"] == 0 and found["tokens"] == 256
    assert found["sequences"][0]["text"].startswith(" sat on the mat and slept.") and said.err.endswith("host syncs: 0\n")
