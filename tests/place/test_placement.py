"""The record of placing, with a row for every module that holds weights; its example; a model in the interpreter."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound import device as facts
from gpubound.place import Placement, placer, verify
from gpubound.place.verify import Agreement
from tests.messages import message

from .models import assert_close, batch, place, tiny, tokens, training_run, twin


def figures_hidden(text):
    return re.sub(r"\d\.\de[-+]\d\d", "#", re.sub(r"\d+\.\d s", "# s", re.sub(r"CPU \(\d+ threads\)", "CPU", text)))


def worst_hidden(text):
    return re.sub(r"verified: .* off by", "verified: ... off by", re.sub(r"backward: .* off by", "backward: ... off by", text))


def test_the_whole_table():
    placement = place(tiny("qwen3", num_hidden_layers=2))
    *lines, last = [re.sub(r" {2,}", " | ", line) for line in worst_hidden(figures_hidden(str(placement))).splitlines()]
    off = "verified: ... off by # (allowed #)"
    norm = f"cpu | float32 | reference rms_norm, add_rms_norm | 0 | {off}"
    assert lines == [
        message("place/placement:the_whole_table"),
        message("place/placement:the_whole_table.2", off),
        message("place/placement:the_whole_table.3", off),
        message("place/placement:the_whole_table.4"),
        message("place/placement:the_whole_table.5", off),
        f"model.layers.*.self_attn.q_norm (2) | {norm}",
        f"model.layers.*.self_attn.k_norm (2) | {norm}",
        message("place/placement:the_whole_table.6", off),
        f"model.layers.*.input_layernorm (2) | {norm}",
        f"model.layers.*.post_attention_layernorm (2) | {norm}",
        f"model.norm | {norm}",
        message("place/placement:the_whole_table.7"),
    ]
    assert "reference kernels" in last and last.endswith("off by # (allowed #). 15 swapped, 0 refused, # s.")


def test_cached_memory_is_released_between_runs_of_a_leaf_and_before_each_group_of_gradients(monkeypatch):
    """What stacked weights and a forward have left is in pieces: 8B reserved 24.8 GiB where 16.4 were allocated."""
    bounds, model = [], tiny("llama", num_hidden_layers=2)
    monkeypatch.setattr(facts, "release_cached", lambda device, most: bounds.append(most))
    monkeypatch.setattr(placer, "CACHED", 1)
    assert place(model).verified
    of_leaves, share = 3 * (2 * 4 + 1), sum(p.nbytes for p in model.parameters()) // verify.KEPT
    assert bounds.count(share) == of_leaves and bounds.count(verify.CACHED) == len(bounds) - of_leaves >= 3


def test_every_parameter_is_under_a_row():
    model = tiny("qwen3")
    placement = place(model)
    names = [row.module for row in placement.rows]
    for name, _ in model.named_parameters():
        assert any(name.startswith(f"{row}.") for row in names), name


def test_rows_are_read_from_the_tensors():
    model = tiny()
    placement = place(model)
    model.model.layers[1].mlp.to(torch.bfloat16)
    assert {row.module: row.dtype for row in placement.rows}["model.layers.1.mlp"] == "bfloat16"
    assert {row.module: row.dtype for row in placement.rows}["model"] == "bfloat16+float32"
    model.model.layers[1].mlp.to("meta")
    assert {row.module: row.device for row in placement.rows}["model.layers.1.mlp"] == "meta"


def test_slower_calls_are_counted():
    model = tiny().eval()
    placement = place(model)
    assert placement.fallbacks == 0
    for _ in range(3):
        model(tokens(), use_cache=True)
    (row,) = [row for row in placement.rows if row.fallbacks]
    assert (row.module, row.fallbacks, row.reasons) == ("model", 3, {"use_cache=True": 3})
    assert row.why.endswith("; 3 calls: use_cache=True")
    assert re.search(r"model  .*  3  +verified: .*; 3 calls: use_cache=True", str(placement))
    training_run(model, batch())
    assert placement.fallbacks == 3


def test_as_dict_is_json():
    placement = place(tiny())
    found = json.loads(json.dumps(placement.as_dict()))
    assert found["verified"] and found["device"] == "cpu" and found["swapped"] == 11 and found["refused"] == 0
    assert found["summary"] == placement.summary and len(found["rows"]) == len(placement.rows)
    assert found["rows"][0].keys() == {
        "module",
        "kind",
        "device",
        "dtype",
        "kernel",
        "why",
        "error",
        "limit",
        "fallbacks",
        "reasons",
    }


def test_fuse_false_swaps_nothing():
    placement = place(tiny(), fuse=False)
    assert placement.verified and placement.swapped == 0
    assert figures_hidden(placement.summary) == message("place/placement:fuse_false_swaps_nothing")


def test_gpu_ready_is_said_only_of_a_verified_gpu():
    def summary(device, verified, monkey):
        monkey.setattr(facts, "label", str)
        verdict = Agreement("loss", 0.0, 1e-3) if verified else Agreement(why="loss missing")
        return Placement(nn.Linear(1, 1), torch.device(device), [], verdict, 1.0).summary

    with pytest.MonkeyPatch.context() as monkey:
        assert summary("cuda", True, monkey).startswith(
            "GPU ready: cuda. Whole model, forward and backward: loss off by 0.0e+00 (allowed 1.0e-03)."
        )
        assert summary("cuda", False, monkey).startswith("On cuda, not verified as a whole: ")
        assert summary("cpu", True, monkey).startswith("cpu: torch. Whole model, forward and backward: ")
        assert summary("cpu", False, monkey).startswith("On cpu, not verified as a whole: ")


EXAMPLE = Path(__file__).parents[2] / "examples" / "place_a_llama.py"


@pytest.mark.slow
def test_place_a_llama(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "model.layers.*.self_attn (2)" in printed and "11 swapped, 0 refused" in printed
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < 0.5 < losses[0]
    assert re.search(r"\{'model': \{'(cache|past_key_values) was given': 24\}\}", printed)


@pytest.mark.slow
def test_the_kernels_train_a_placed_model(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = tiny(hidden_size=16, num_hidden_layers=1, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1).to(
        device
    )
    inputs = {name: t.to(device) for name, t in batch(length=5).items()}
    want = training_run(twin(model), inputs)
    placement = gb.place(model, device, strict=True)
    assert placement.verified and placement.fallbacks == 0
    kernels = {row.module: row.kernel for row in placement.rows}
    assert kernels["model.layers.0.self_attn"] == message("place/interpreted:the_kernels_train_a_plac")
    assert kernels["(the model)"] == message("place/interpreted:the_kernels_train_a_plac.2")
    assert_close(training_run(model, inputs), want, 1e-4)


@pytest.mark.parametrize("classes", [["no", "yes"], ["value"]])
def test_a_model_with_a_head_of_classes_is_verified(classes):
    """Token ids were the labels of its loss, which was NaN: not verified, and an error under strict."""
    torch.manual_seed(0)
    judge = gb.Decoder(gb.DecoderConfig(hidden=16, intermediate=32, layers=1, heads=2, kv_heads=1, vocabulary=40))
    judge.classify(classes)
    with gb.strict():
        placement = gb.place(judge)
    assert "Whole model, forward and backward: output off by" in str(placement)
