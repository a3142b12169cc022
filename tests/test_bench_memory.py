"""The benchmark of recipes for small GPUs, dry: what each holds besides activations, by its own step and by the prediction."""

import json

import pytest
import torch

from benchmarks import bench_memory, memory_worker
from benchmarks.harness import Bench
from benchmarks.memory_rows import keep_phases, peaks_in
from benchmarks.serving import MARK
from gpubound.device import CONTEXT


def answered(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(MARK))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(bench_memory.RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_runs_and_holds_what_is_predicted(recipe, capsys):
    memory_worker.main({"recipe": str(recipe), "device": "cpu", "dry": True})
    (facts,) = answered(capsys).values()
    assert facts["peaks"] == {} and list(facts["predicted"]) == ["place", "make step", "first step", "steps"]
    assert 0 < sum(facts["state"].values()) < facts["predicted"]["make step"] < facts["room"]


def test_the_command_of_a_script_is_decoded(capsys):
    memory_worker.main({"recipe": str(bench_memory.RECIPES / "decode_8b_8gb.sh"), "device": "cpu", "dry": True})
    (facts,) = answered(capsys).values()
    assert facts["peaks"] == {} and 0 < facts["state"]["weights"] < facts["room"] == 8 * 10**9 - CONTEXT


@pytest.mark.slow
def test_one_step_with_each_option(capsys):
    """Each holds less than the one before; offloaded state has buffers, of a tiny model all of it."""
    job = {
        "recipe": "",
        "device": "cpu",
        "dry": True,
        "shape": "tiny",
        "seq": 1024,
        "micro": 1,
        "options": bench_memory.BY_OPTION,
    }
    memory_worker.main(job)
    found = {name.partition(", ")[2]: sum(facts["state"].values()) for name, facts in answered(capsys).items()}
    assert found.keys() == bench_memory.BY_OPTION.keys()
    smaller = ("the defaults", "bf16-split", "adamw8bit", "both", "both, update_in_backward")
    assert [found[name] for name in smaller] == sorted((found[name] for name in smaller), reverse=True)
    assert found["lora"] == found["lora, base nf4"] < found["adamw8bit"] and found["recompute 12"] == found["the defaults"]


def test_a_line_for_each_phase(tmp_path):
    peaks = peaks_in(
        {phase: {"allocated": 2**30, "reserved": reserved * 2**30} for phase, reserved in (("first step", 4), ("steps", 2))}
    )
    bench = Bench("train", torch.device("cpu"), "gpubound bench train", folder=tmp_path)
    keep_phases(bench, "tiny", peaks, {"first step": ("a later step", peaks["steps"].reserved, 1 / 1.05)})
    first, allocated, steps = bench.lines
    assert (first.case, first.ours, first.peer, first.ratio, first.short) == ("tiny memory, first step", 4, 2, 0.5, True)
    assert (allocated.peer_name, allocated.peer, allocated.gate) == ("allocated", 1, None)
    assert (steps.case, steps.ours, steps.peer_name) == ("tiny memory, steps", 2, "allocated")


def test_an_unknown_recipe_is_named():
    with pytest.raises(ValueError, match="only: got 'qlora_9b', wanted some of decode_8b_8gb, full_1b_16gb, "):
        bench_memory.main(["--only", "qlora_9b", "--dry"])
