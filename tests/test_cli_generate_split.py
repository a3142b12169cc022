"""`gpubound generate --split`: one copy of the model, shared by several devices. The CPU stands for each."""

import json
import re

import pytest
import torch

from gpubound.cli import main
from gpubound.decode.request import Generated, Generation
from gpubound.generate import batches, batches as opening
from gpubound.generate.batches import Speed
from tests.messages import message, same_texts

from . import by_heart

pytestmark = pytest.mark.usefixtures("one_thread")
reference, ckpt, run = by_heart.reference, by_heart.ckpt, by_heart.run  # fixtures
SHARED = ("--gpus", "2")
PROMPTS = ("--prompt", "the cat", "--prompt", "one two", "--prompt", "<|user|>hello")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["layers", "tensors"])
def test_two_devices_write_what_one_writes(ckpt, run, split):
    given = (ckpt, *PROMPTS, "--max-new-tokens", "12")
    code, wanted, _ = run(*given)
    assert code == 0
    code, found, err = run(*given, *SHARED, "--split", split)
    assert (code, found) == (0, wanted), err
    part = "stage" if split == "layers" else "slice"
    assert all(f"decoder: {part} {number} on CPU" in err for number in range(2)) and " on 2 x CPU" in err


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("split", ["layers", "tensors"])
def test_two_gpus_write_what_the_cpu_writes(ckpt, run, split):
    given = (ckpt, *PROMPTS, "--max-new-tokens", "12")
    wanted = run(*given)[1]
    code, found, err = run(*given, *SHARED, "--split", split, device="auto")
    assert (code, found) == (0, wanted), err
    assert " on 2 x NVIDIA" in err


@pytest.mark.slow
def test_a_conversation_and_json(ckpt, run):
    code, out, err = run(ckpt, "--chat", *SHARED, "--split", "tensors", stdin="hello\n")
    assert code == 0 and "hi, how are you?" in out, err
    code, out, _ = run(ckpt, *PROMPTS, "--max-new-tokens", "3", "--json", "--logprobs", *SHARED, "--split", "layers")
    found = json.loads(out)
    assert code == 0 and [len(one["logprobs"]) for one in found["sequences"]] == [3, 3, 3]
    assert found["device"].startswith("2 x CPU")


@pytest.mark.slow
def test_slices_take_eight_sequences_at_once(ckpt, run, monkeypatch):
    """Whatever --batch says: more would be refused."""
    built = []
    build = batches.build_decoder
    monkeypatch.setattr(
        batches,
        "build_decoder",
        lambda options, saved, probe, *rest: built.append(len(probe)) or build(options, saved, probe, *rest),
    )
    code, out, err = run(
        ckpt,
        *(word for _ in range(9) for word in ("--prompt", "the cat")),
        "--max-new-tokens",
        "4",
        *SHARED,
        "--split",
        "tensors",
    )
    assert code == 0 and built == [8] and len(re.findall(r"^--- \d: ", out, re.M)) == 9, err


def test_the_roofline_is_that_of_all_that_read_at_once():
    """As in the benchmark: a share of one GPU's was up to four times too high."""
    speed = Speed(torch.device("cuda"))
    speed._rate = 1e9
    given = {"launches": 5, "steps": 10, "row_steps": 10, "bytes_read": 1_000_000_000}
    found = Generation([Generated([1], [2] * 10)], 2.0, 0.5, **given, at_once=4)
    speed.add(found)
    assert (speed.roofline, speed.as_dict()["read_bytes_per_s"]) == (0.125, 4e9) and found.roofline(1e9) == 0.125
    assert message("cli_generate_split:the_roofline_is_that_of").within(speed.line())
    speed.add(Generation([Generated([1], [2] * 10)], 2.0, 0.5, **given))  # the last prompt is alone, in one lane
    assert speed.roofline == pytest.approx((0.125 + 0.5) / 2)


def test_a_folder_in_codes_is_read_to_where_its_parts_stay(monkeypatch, tmp_path):
    """Layers onto the devices. Slices are cut from the host's memory, as of any other folder, where that has room."""
    seen, cpu, gpu = [], torch.device("cpu"), torch.device("cuda")

    class Stop(Exception):
        pass

    def load(folder, about, device, *rest):
        seen.append((device, rest[-1]))
        raise Stop

    monkeypatch.setattr(opening, "_from_folder", load)
    monkeypatch.setattr(opening, "_folder_tokenizer", lambda *given: None)
    monkeypatch.setattr(opening, "read_generation", lambda *given: {})
    monkeypatch.setattr(opening, "find_source", lambda *given: tmp_path)
    coded = {"model_type": "deepseek_v4", "quantization_config": {"quant_method": "fp8"}}
    for about in (coded, {"model_type": "llama"}):
        monkeypatch.setattr(opening, "read_config", lambda source, about=about: about)
        for devices, split in (((gpu, gpu), "layers"), ((gpu, gpu), "tensors"), (gpu, "layers")):
            with pytest.raises(Stop):
                opening.open_saved(tmp_path, devices, split=split)
    assert seen == [((gpu, gpu), gpu), (cpu, gpu), (gpu, gpu), (cpu, gpu), (cpu, gpu), (gpu, gpu)]
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    monkeypatch.setattr(opening, "read_config", lambda source: coded)
    monkeypatch.setattr(opening, "host_bytes", lambda: 4)
    with pytest.raises(Stop):
        opening.open_saved(tmp_path, (gpu, gpu), split="tensors")
    assert seen[-1] == ((gpu, gpu), gpu)


def test_what_is_refused(ckpt, tmp_path, capsys):
    """Much of it before a model is read: of one that no single GPU has room for that takes minutes."""
    said = []
    for model, given in (
        (ckpt, ("--split", "rows", *SHARED)),
        (ckpt, ("--split", "layers", *SHARED, "--out", "a.jsonl")),
        (ckpt, ("--split", "layers", "--gpus", "1")),
        (ckpt, ("--split", "layers", "--device", "cpu")),
        (ckpt, ("--split", "tensors", "--gpus", "3", "--device", "cpu")),
        (tmp_path, ("--split", "layers", *SHARED, "--weights", "int8")),
        (tmp_path, ("--split", "tensors", *SHARED, "--speculate", "2")),
        (tmp_path, ("--split", "layers", *SHARED, "--no-fused")),
        (tmp_path, ("--split", "tensors", *SHARED, "--n", "9")),
    ):
        assert main(["generate", str(model), "--prompt", "one", *given]) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    same_texts("cli_generate_split:what_is_refused", said)
