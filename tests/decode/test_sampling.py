"""Sampling settings of a model's generation config: used where they are asked for, and an explicit setting wins."""

import json
from types import SimpleNamespace

import pytest

import gpubound as gb
from gpubound.decode.request import Choice, describe_sampling, model_sampling
from gpubound.decode.rollout_request import RolloutRequest

from . import cases

PROMPT = cases.prompts(5)[0]


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, Choice()),
        ({"temperature": 0.6, "top_p": 0.9}, Choice()),  # without do_sample the model is greedy
        ({"repetition_penalty": 1.3}, Choice(repetition_penalty=1.3)),
        ({"do_sample": True}, Choice(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
            Choice(0.6, 20, 0.9, 0.1, 1.1),
        ),
        ({"do_sample": True, "temperature": None, "top_k": None}, Choice(temperature=1.0)),
    ],
)
def test_settings_of_a_generation_config(config, want):
    assert Choice(**model_sampling(config)) == want


@pytest.mark.parametrize(
    "settings, filtered",
    [
        ({}, False),
        ({"temperature": 1.0, "repetition_penalty": 1.3}, False),
        ({"top_k": 5}, False),  # of the greatest logit alone
        *(({"temperature": 1.0, name: value}, True) for name, value in (("top_k", 5), ("top_p", 0.9), ("min_p", 0.1))),
    ],
)
def test_only_requests_under_top_k_top_p_or_min_p_have_their_launch(settings, filtered):
    """By the options of a launch; a row of rollouts may be one of few."""
    assert Choice(**settings).filtered == filtered
    running = [SimpleNamespace(choice=Choice()), SimpleNamespace(choice=Choice(**settings))]
    assert RolloutRequest(running, (), (), False, 1, False).variant.filtered == filtered


def test_the_line_names_what_is_in_force_and_what_is_not():
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "num_beams": 4, "typical_p": 1.0}
    line = describe_sampling(config, {"temperature": 0.2, "top_k": None})
    assert "temperature 0.2" in line and "top_p 0.9" in line and "num_beams=4" in line
    assert "top_k" not in line and "typical_p" not in line
    assert "greedy" in describe_sampling({})


def test_a_decoder_samples_as_the_model_says(capfd):
    model = cases.build("Llama")
    fast = gb.decoder(model, 1, cases.ROOM)
    config = model.generation_config
    config.do_sample, config.temperature, config.top_k, config.repetition_penalty = True, 2.5, 11, 1.2
    asked = {"temperature": 2.5, "top_k": 11, "repetition_penalty": 1.2}
    want = fast.generate(PROMPT, max_new_tokens=20, seed=3, **asked).tokens
    greedy = fast.generate(PROMPT, max_new_tokens=20).tokens
    assert want != greedy  # a plain call is still greedy
    capfd.readouterr()
    assert fast.generate(PROMPT, max_new_tokens=20, seed=3, sampling="model").tokens == want
    assert "temperature 2.5, top_k 11, repetition_penalty 1.2" in capfd.readouterr().err
    assert [new for _, piece in fast.stream(PROMPT, max_new_tokens=20, seed=3, sampling="model") for new in piece] == want[0]
    explicit = {"temperature": 0, "repetition_penalty": 1}
    assert fast.generate(PROMPT, max_new_tokens=20, sampling="model", **explicit).tokens == greedy


def test_a_decoder_of_ours_reads_the_folder_s_generation_config(tmp_path):
    from gpubound.models.llama.checkpoint import load_hf

    model = cases.build("Llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 2.5, "top_k": 7}))
    fast = gb.decoder(load_hf(tmp_path), 1, cases.ROOM)
    want = fast.generate(PROMPT, max_new_tokens=12, temperature=2.5, top_k=7).tokens
    assert fast.generate(PROMPT, max_new_tokens=12, sampling="model").tokens == want
    assert fast.generate(PROMPT, max_new_tokens=12).tokens != want
