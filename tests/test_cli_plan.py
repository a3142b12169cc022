"""`gpubound plan`, the line of memory before a run, and the error of a run whose memory ran out."""

import json

import pytest
import torch

import gpubound as gb
from gpubound.cli import arguments, main, session as memory
from gpubound.cli.train_options import Train
from gpubound.data import Corpus, python_stdlib_texts, train_tokenizer
from gpubound.errors import DeviceError
from gpubound.models.llama.checkpoint import hf_config
from gpubound.models.llama.decoder import PRESETS, DecoderConfig
from gpubound.trace import fallbacks
from gpubound.train.recipe import Recipe

SMALL = ["--model", "135m", "--seq", "1024", "--micro-batch", "2", "--accumulate", "8"]
CONFIG = "model: 1b\nvocabulary: 128256\nseq: 2048\nmicro_batch: 8\naccumulate: 32\n"


def planned(capsys, *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_in_json_is_the_golden_one(capsys):
    found = planned(capsys, *SMALL, "--vocabulary", "49152", "--gpus", "2", "--memory", "24")
    best = found["best"]
    assert best["options"][:-4] == ["--micro-batch", "8", "--accumulate", "2", "--recompute", "none"]
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
    assert main(["plan", str(config), "--gpus", "8", "--accumulate", "512", "--lr", "1e-4"]) == 0
    printed = capsys.readouterr().out
    assert "8 x H200" in printed and "8.39M tokens" in printed and "assumed: a GPU sends 370 GB/s" in printed
    best = printed.splitlines()[-1]
    assert best.startswith(f"best: gpubound train {config} --lr 0.0001 --micro-batch ") and best.endswith(" --gpus 8")
    config.write_text(CONFIG + "memory: 48 GB\n")
    assert main(["plan", str(config)]) == 0
    assert "1 x H200, 45 GiB" in capsys.readouterr().out
    config.write_text(CONFIG)
    assert main(["plan", str(config), "--gpu", "h100"]) == 0
    assert "1 x H100 SXM, 79 GiB" in capsys.readouterr().out


def test_what_is_proposed_can_be_pasted(capsys):
    best = planned(capsys, *SMALL)["best"]
    options = arguments(Train, [*SMALL, *best["options"]], "train", Train())
    recipe = options.recipe()
    assert recipe.tokens_per_step == 16384 and recipe.micro_batch == best["micro_batch"]


THEIRS = "model_name_or_path: 135m\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nmax_length: 1024\n"


def test_options_and_configs_of_other_trainers_are_read(capsys, tmp_path):
    ours = planned(capsys, *SMALL)
    theirs = ["--per-device-train-batch-size", "2", "--gradient_accumulation_steps=8", "--max-seq-length", "1024"]
    assert planned(capsys, "--model", "135m", *theirs) == ours
    config = tmp_path / "theirs.yaml"
    config.write_text(THEIRS)
    assert planned(capsys, "--from", str(config))["tokens_per_step"] == ours["tokens_per_step"]
    assert main(["plan", "--from", str(config), "--num-train-epochs", "2"]) == 0
    printed = capsys.readouterr()
    assert f"best: gpubound train --from {config} --epochs 2" in printed.out and "# everything was translated" in printed.err


def test_nothing_that_fits_is_exit_code_1(capsys):
    assert main(["plan", "--model", "8b", "--seq", "4096", "--gpu", "h100"]) == 1
    assert "nothing fits: at least" in capsys.readouterr().out
    assert main(["plan", "--memory", "0.5"]) == 1
    assert " of 0.5 a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["--gpu", "a100"], ("'a100'", "h200, h100", "here", "--memory")),
        (["--gpus", "3"], ("8 rows", "micro_batch 8 x accumulate 1", "3 GPUs", "--accumulate 3")),
        (["--gpus", "0"], ("gpus", "got 0", "at most 8")),
        (["--gpus", "16", "--accumulate", "16"], ("gpus", "got 16", "at most 8")),
        (["--memory", "inf"], ("memory", "got inf")),
        (["--memory", "nan"], ("memory", "got nan")),
        (["--memory", "24 XB"], ("memory", "got 24 XB", "24 GB")),
        (["--rows", "-1"], ("rows", "got -1")),
        (["--max-lenght", "9"], ("no option --max-lenght", "--max_length", "'seq'", "See gpubound plan --help")),
        (["--recompute", "11"], ("recompute", "got 11", "10")),
        (["--model", "diffusion-tiny"], ("model", "diffusion-tiny", "RichardsDecoder")),
        (["--objective", "diffusion", "--model", "diffusion-tiny"], ("objective", "diffusion", "next_token")),
    ],
)
def test_bad_input_is_one_sentence(argv, facts, capsys):
    assert main(["plan", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gpubound plan: ") and err.count("\n") == 1 and "plan: plan:" not in err
    assert not [fact for fact in facts if fact not in err], err


def test_a_rate_that_was_not_measured_is_exit_code_3(capsys):
    assert main(["plan", "--precision", "fp32"]) == 3
    assert "fp32" in (err := capsys.readouterr().err) and "bf16, fp16, fp8" in err


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


@pytest.mark.slow
def test_adapters_are_planned_with_their_frozen_base(adapters, capsys):
    assert main(["plan", str(adapters), "--gpus", "2"]) == 0
    printed = capsys.readouterr().out
    assert "1.24G parameters frozen in nf4, 11.3M in adapters of rank 16" in printed
    assert "frozen weights" in printed and "dequantised weights" in printed
    assert f"best: gpubound train {adapters} --micro-batch" in printed
    assert main(["plan", str(adapters), "--lora-r", "8", "--lora-target-modules", "q_proj", "v_proj"]) == 0
    assert f"train {adapters} --lora-r 8 --lora-target-modules q_proj v_proj --micro-batch" in capsys.readouterr().out
    best = planned(capsys, str(adapters), "--gpus", "2")
    assert (best["parameters"], best["trained"]) == (1235814400, 11272192)
    assert best["best"]["memory"]["adapters"] == 2 * best["trained"]


@pytest.mark.slow
def test_a_config_is_checked_with_its_options(adapters, capsys):
    """As gpubound train does: the file alone names no model for its adapters, and counts epochs."""
    model, *rest = adapters.read_text().splitlines()
    adapters.write_text("\n".join([*rest, "epochs: 2"]))
    best = planned(capsys, str(adapters), "--model", model.split()[1], "--steps", "9")
    assert best["trained"] == 11272192
    assert main(["plan", str(adapters)]) == 2 and f"{adapters}: recipe: lora: " in capsys.readouterr().err


def test_adapters_that_are_not_counted_are_refused(adapters, capsys):
    adapters.write_text(adapters.read_text().replace("base: nf4", "dora: true"))
    assert main(["plan", str(adapters)]) == 2
    assert "lora: got dora" in capsys.readouterr().err


CUDA, RECIPE = torch.device("cuda", 0), Recipe(model="135m", vocabulary=49152, seq=1024, micro_batch=16)


@pytest.fixture
def card(monkeypatch):
    """card(gib): the memory of the GPU."""
    return lambda gib: monkeypatch.setattr(memory, "total_bytes", lambda device: int(gib * 2**30))


def test_the_peak_of_each_phase_is_printed_before_the_run(card, capsys):
    card(24)
    predicted = memory.predict(RECIPE, CUDA, 1)
    line = capsys.readouterr().err
    assert list(predicted) == ["place", "make step", "first step", "steps"] and predicted["place"] < predicted["steps"]
    assert f"first step {predicted['first step'] / 2**30:.1f}, " in line and "of 24.0" in line
    assert memory.predict(RECIPE, torch.device("cpu"), 1) == {}


def test_a_model_whose_activations_are_not_counted_is_named(card, capsys):
    card(24)
    assert memory.predict(Recipe(model="diffusion-tiny", objective="masked_diffusion"), CUDA, 1) == {}
    assert "not predicted" in capsys.readouterr().err


def ran_out(recipe: Recipe) -> str:
    with pytest.raises(DeviceError) as error, memory.explained(recipe, CUDA, 1):
        raise DeviceError("out of memory: first step: much was allocated.") from torch.OutOfMemoryError("CUDA")
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "options"),
    [
        (8, "--micro-batch 8 --accumulate 2 would fit"),
        (4, "--micro-batch 1 --accumulate 16 would fit"),
        (3.6, "--micro-batch 1 --accumulate 16 --recompute blocks would fit"),
        (3.4, "--micro-batch 1 --accumulate 16 --optimizer adamw8bit would fit"),
        (1, "no other step fits"),
    ],
)
def test_memory_that_ran_out_names_the_first_options_that_fit(card, gib, options):
    card(gib)
    text = ran_out(RECIPE)
    assert text.startswith("out of memory: first step") and options in text, text


@pytest.mark.slow
def test_each_kind_of_run_gets_its_own_advice(card, tmp_path):
    """Adapters over a base in 16 bits get one in NF4; all weights offloaded state, and updates in backward without clipping."""
    shape = DecoderConfig(1024, 2048, 16, 8, 4, 8192)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, torch.bfloat16)))
    run = {"model": str(tmp_path), "data": ("x.jsonl",), "seq": 256, "micro_batch": 1}
    lora = {"rank": 8, "alpha": 8}
    for gib, more, wanted in (
        (1.3, {"lora": lora}, "lora: {base: nf4} would fit"),
        (1.0, {"lora": lora}, "no other step fits: take shorter rows or a smaller model"),
        (2.5, {"accumulate": 2, "optimizer": "adamw8bit"}, "--offload-optimizer True would fit"),
        (1.6, {}, "--update-in-backward True --clip 0 --offload-optimizer True would fit"),
        (1.6, {"ema": 0.99}, "no other step fits: take shorter rows, a smaller model, or lora"),
    ):
        card(gib)
        assert wanted in (text := ran_out(Recipe(**run, **more))), (gib, more, text)


def test_other_errors_are_as_they_were(card):
    card(24)
    with pytest.raises(DeviceError, match=r"^no GPU$"), memory.explained(RECIPE, CUDA, 1):
        raise DeviceError("no GPU")
    card(24)
    assert "recompute=blocks" in ran_out(Recipe(model="diffusion-tiny", objective="masked_diffusion"))


@pytest.mark.gpu
def test_a_run_under_a_limit_is_predicted_measured_and_explained(tmp_path):
    """The phases of a run that fits are within its limit; one that does not fit names its phase and a step that does."""
    texts = list(python_stdlib_texts(800_000))
    corpus = Corpus.build(texts, train_tokenizer(texts, 300), tmp_path / "corpus", progress=False).path
    keys = {"data": [str(corpus)], "model": "10m", "seq": 512, "steps": 4, "validation": 0.0, "memory": "3 GiB", "quiet": True}
    torch.cuda.empty_cache()
    try:
        trained = gb.train(**keys, micro_batch=2, out=str(tmp_path / "fits"))
        peaks = trained.run.memory.peaks
        assert list(peaks) == ["place", "make step", "first step", "steps"]
        assert all(peak.allocated <= peak.reserved <= 3 << 30 for peak in peaks.values())
        with pytest.raises(DeviceError, match=r"out of memory: first step.*would fit") as error:
            gb.train(**keys, micro_batch=192, out=str(tmp_path / "too large"))
        assert "GB" in str(error.value) and "moments" in str(error.value)
    finally:
        gb.limit(None)
        fallbacks.clear()  # the capture that found no memory
