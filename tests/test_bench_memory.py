"""The benchmark of recipes for small GPUs, dry: what each holds besides activations, by its own step and by the prediction."""

import json

import pytest

from benchmarks import bench_memory, memory_worker
from benchmarks.serving import MARK
from gpubound.device import CONTEXT


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(bench_memory.RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_runs_and_holds_what_is_predicted(recipe, capsys):
    memory_worker.main({"recipe": str(recipe), "device": "cpu", "dry": True})
    facts = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(MARK))
    assert facts["peaks"] == {} and list(facts["predicted"]) == ["place", "make step", "first step", "steps"]
    assert 0 < sum(facts["state"].values()) < facts["predicted"]["make step"] < facts["room"]


def test_the_command_of_a_script_is_decoded(capsys):
    memory_worker.main({"recipe": str(bench_memory.RECIPES / "decode_8b_8gb.sh"), "device": "cpu", "dry": True})
    facts = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(MARK))
    assert facts["peaks"] == {} and 0 < facts["state"]["weights"] < facts["room"] == 8 * 10**9 - CONTEXT


def test_an_unknown_recipe_is_named():
    with pytest.raises(ValueError, match="only: got 'qlora_9b', wanted some of decode_8b_8gb, full_1b_16gb, "):
        bench_memory.main(["--only", "qlora_9b", "--dry"])
