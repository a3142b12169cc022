"""gpubound plan: what it prints, what it refuses, and that what it proposes can be pasted."""

import json

import pytest
import torch

from gpubound.cli import arguments, main
from gpubound.cli.train import Train
from gpubound.models.llama.decoder import PRESETS
from gpubound.models.llama.weights import hf_config
from tests.messages import message

SMALL = ["--model", "135m", "--seq", "1024", "--micro-batch", "2", "--accumulate", "8"]
CONFIG = "model: 1b\nvocabulary: 128256\nseq: 2048\nmicro_batch: 8\naccumulate: 32\n"


def planned(capsys, *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_in_json_is_the_golden_one(capsys):
    found = planned(capsys, *SMALL, "--vocabulary", "49152", "--gpus", "2", "--memory", "24")
    best = found["best"]
    assert best["options"][:-2] == ["--micro-batch", "8", "--accumulate", "2", "--recompute", "none"]
    assert found == found | {
        "model": "135m", "gpus": 2, "gpu": "h200", "memory_bytes": 24 << 30, "parameters": 134515008, "precision": "bf16",
        "tokens_per_step": 16384,
    }  # fmt: skip
    assert best["memory"] == best["memory"] | {
        "weights": 269030016, "masters": 538060032, "gradient": 538060032, "moments": 1076120064,
    }  # fmt: skip
    assert best["sent_bytes_per_gpu"] == 538060032
    assert (best["parallel"], best["fits"], best["bottleneck"]) == ("ddp", True, "arithmetic")
    assert sum(best["memory"].values()) == best["bytes_per_gpu"]
    assert sum(best["seconds"].values()) == pytest.approx(best["step_s"])
    assert best["tokens_per_s"] == pytest.approx(16384 / best["step_s"])


def test_a_config_is_planned_and_its_options_can_be_overridden(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    assert main(["plan", str(config), "--gpus", "1024", "--accumulate", "512"]) == 0
    said = capsys.readouterr().out
    assert "1,024 x H200" in said and message("cli_plan:a_config_is_planned_and").within(said)
    assert message("cli_plan:a_config_is_planned_and.2", config).within(said)
    assert main(["plan", str(config), "--gpu", "h100"]) == 0
    assert message("cli_plan:a_config_is_planned_and.3").within(capsys.readouterr().out)


def test_what_is_proposed_can_be_pasted(capsys):
    best = planned(capsys, *SMALL)["best"]
    options = arguments(Train, [*SMALL, *best["options"]], "train", Train())
    recipe = options.recipe()
    assert recipe.tokens_per_step == 16384 and recipe.micro_batch == best["micro_batch"]


def test_nothing_that_fits_is_exit_code_1(capsys):
    assert main(["plan", "--model", "8b", "--seq", "4096", "--gpu", "h100"]) == 1
    assert "nothing fits: at least" in capsys.readouterr().out
    assert main(["plan", "--memory", "0.5"]) == 1
    assert message("cli_plan:nothing_that_fits_is_exi").within(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--gpu", "a100"],
            "gpu: got 'a100', wanted one whose rates were measured: h200, h100, or here, which measures this machine's; give "
            "one of them, and --memory where yours holds more or less.",
        ),
        (
            ["--gpus", "3"],
            "a step has 8 rows (micro_batch 8 x accumulate 1), wanted a multiple of the 3 GPUs that share them; give "
            "--accumulate 3.",
        ),
        (["--gpus", "0"], "gpus must be above 0, got 0."),
        (["--nvlink", "nan"], "nvlink must be above 0, got nan."),
        (["--memory", "inf"], "memory must be at most 1e+15, got inf."),
        (["--memory", "1e300"], "memory must be at most 1e+15, got 1e+300."),
        (
            ["--gpus", "20", "--accumulate", "20"],
            "gpus: got 20 in nodes of 8, wanted whole nodes; give --gpus 16, or another --node.",
        ),
        (["--recompute", "11"], "recompute: got 11 blocks, the model has 10; give at most so many."),
        (
            ["--model", "diffusion-tiny"],
            "model: got diffusion-tiny, a RichardsDecoder, wanted one that our Llama-shaped Decoder computes; what "
            "backward keeps of other models is not counted.",
        ),
        (["--check", "--results", "nowhere"], "check: nowhere/nvidia-h200.jsonl is missing; give the folder of the committed "
         "results with --results, as it lies in the repository: benchmarks/results."),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(argv, sentence, capsys):
    assert main(["plan", *argv]) == 2
    assert capsys.readouterr().err == f"gpubound plan: {sentence}\n"


def test_a_rate_that_nobody_measured_is_exit_code_3(capsys):
    assert main(["plan", "--precision", "fp32"]) == 3
    assert message("cli_plan:a_rate_that_nobody_measu").within(capsys.readouterr().err)


@pytest.fixture
def adapters(tmp_path):
    """A config with a lora section over a folder that holds a config.json and no weights."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(PRESETS["1b"], torch.bfloat16)))
    (tmp_path / "lora.yaml").write_text(
        f"model: {folder}\nlora: {{rank: 16, base: nf4}}\nseq: 1024\nmicro_batch: 8\naccumulate: 4\n"
    )
    return tmp_path / "lora.yaml"


def test_adapters_are_planned_beside_their_frozen_base(adapters, capsys):
    assert main(["plan", str(adapters), "--gpus", "2"]) == 0
    said = capsys.readouterr().out
    assert message("cli_plan:adapters_are_planned_bes").within(said)
    assert message("cli_plan:adapters_are_planned_bes.2").within(said)
    assert message("cli_plan:adapters_are_planned_bes.3").within(said)
    assert f"best: gpubound train {adapters} --micro-batch" in said
    best = planned(capsys, str(adapters), "--gpus", "2")
    assert (best["parameters"], best["trained"]) == (1235814400, 11272192)
    assert best["best"]["memory"]["adapters"] == 2 * best["trained"]


def test_a_lora_section_that_is_not_counted_is_one_sentence(adapters, capsys):
    adapters.write_text(adapters.read_text().replace("base: nf4", "dora: true"))
    assert main(["plan", str(adapters)]) == 2
    said = "gpubound plan: lora: got dora, wanted plain adapters, whose kept bytes are counted; leave dora out to plan.\n"
    assert capsys.readouterr().err == said
