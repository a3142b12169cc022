"""The line before a run, and the error of a run whose memory ran out, on a GPU that is pretended."""

import json

import pytest
import torch

import gpubound as gb
from gpubound.cli import session as memory
from gpubound.data import Corpus, python_stdlib_texts, train_tokenizer
from gpubound.errors import DeviceError
from gpubound.models.llama.checkpoint import hf_config
from gpubound.models.llama.decoder import DecoderConfig
from gpubound.trace import fallbacks
from gpubound.train.recipe import Recipe

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
        (1.6, {"optimizer": "muon"}, "no other step fits: take shorter rows, a smaller model, or lora"),
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
