"""A model in stages, beside the model itself. The CPU stands for each of several devices here; test_gpu.py has two GPUs."""

from types import SimpleNamespace

import pytest
import torch

import gpubound as gb
from gpubound.decode import certificate
from gpubound.decode.placement import pipeline as graphs
from gpubound.decode.runner import ModelRunner
from gpubound.decode.transformer import FusedRunner
from tests.messages import message

from .. import cases

KINDS = {"Llama placed": 2, "Gemma3": 3, "Qwen3Moe": 2, "own": 2}


def staged(kind: str = "Llama", stages: int = 2, **options) -> gb.FastDecoder:
    """Texts that some windows of Gemma 3 are shorter than."""
    return gb.decoder(model(kind), 4, cases.ROOM, devices=["cpu"] * stages, **options)


def model(kind: str = "Llama") -> torch.nn.Module:
    if kind == "own":
        return cases.build(kind)
    return cases.build(kind, **{"num_hidden_layers": 4} | ({"layer_types": None} if kind == "Gemma3" else {}))


@pytest.mark.slow
@pytest.mark.parametrize("kind, stages", KINDS.items())
def test_tokens_are_those_of_the_model(kind, stages):
    """One row and several of different lengths: fewer rows than lanes, and more."""
    fast = staged(kind, stages)
    assert len(fast.body.spans) == stages and fast.path == "" and fast.certificate.logits_error is not None
    for lengths in ((5,), (1, 19, 6)):
        cases.assert_greedy(fast, cases.prompts(*lengths), 12)


@pytest.mark.slow
def test_settings_stops_and_figures_of_rows_in_lanes():
    """Drawn tokens, penalties, log-probabilities and stops are those of a decoder on one device; the cache's forms too."""
    kept = {"cache": "int8", "pages": 12, "verify": False}
    cases.assert_alike(staged(**kept), gb.decoder(model(), 4, cases.ROOM, **kept))


@pytest.mark.parametrize("devices, rows, at_once", [(2, 1, 1), (2, 3, 2), (4, 3, 3), (4, 9, 4)])
def test_each_lane_reads_the_weights(devices, rows, at_once):
    """A device for each lane reads at the same time; the CPU, that stands for several, reads them one after the other."""
    fast = staged(stages=devices, verify=False)
    once, token = fast.body.bytes_a_step([]), fast.body.bytes_a_step([1]) - fast.body.bytes_a_step([])
    given = cases.prompts(*[5] * min(rows, 4))
    found = fast.generate(given, max_new_tokens=4)
    lanes = min(len(given), devices)
    assert found.bytes_read == 4 * (lanes * once + len(given) * 7 * token) and found.at_once == 1
    gpus = SimpleNamespace(peers=(), spans=[SimpleNamespace(device=number) for number in range(devices)])
    gpus.lanes = lambda rows: ModelRunner.lanes(gpus, rows)
    assert ModelRunner.readers(gpus, rows) == at_once
    gpus.peers = gpus.spans  # slices
    assert ModelRunner.readers(gpus, rows) == devices and len(ModelRunner.lanes(gpus, rows)) == 1


@pytest.mark.slow
def test_weights_that_change_and_weights_that_move():
    cases.assert_follows(staged(verify="quick"))


@pytest.mark.slow
def test_rows_are_compared_as_their_lanes_take_them(monkeypatch):
    """Rows that go through the model together may come out otherwise than alone, as from tensor cores. Here they are others."""
    leave = FusedRunner.leave
    monkeypatch.setattr(FusedRunner, "leave", lambda body, x: leave(body, x) * (1 if len(x) == 1 else -1))
    monkeypatch.setattr(FusedRunner, "finds_best", lambda body, rows: False)
    assert staged(verify="quick").certificate.tokens_compared == 2 * certificate.ON_CPU
    with pytest.raises(gb.GenerateError, check=message("decode/stages/decoder:rows_are_compared_as_the")):
        monkeypatch.setattr(ModelRunner, "lanes", lambda body, rows: [range(rows)])
        staged(verify="quick")


def test_a_lane_that_reads_the_keys_of_another_fails_the_certificate(monkeypatch):
    own = FusedRunner.pass_stage
    monkeypatch.setattr(FusedRunner, "pass_stage", lambda body, number, *stream: own(body, number, *stream[:-1], 0))
    monkeypatch.setattr(certificate, "ON_CPU", 12)
    with pytest.raises(gb.GenerateError, check=message("decode/stages/decoder:a_lane_that_reads_the_ke")):
        staged(verify="quick")


def test_rows_that_are_not_handed_over_fail_the_certificate(monkeypatch):
    """What the lanes bring is compared with steps of their rows, stage by stage."""
    monkeypatch.setattr(graphs.Handover, "send", lambda self, to: None)
    with pytest.raises(gb.GenerateError, check=message("decode/stages/decoder:rows_that_are_not_handed")):
        staged(verify="quick")


def test_the_plan_is_printed_and_stands_in_the_table(said):
    fast = staged(stages=3, verify=False)
    lines = [line for line in said().splitlines() if "stage" in line]
    assert [line.partition(" on ")[0] for line in lines] == [f"gpubound: decoder: stage {number}" for number in range(3)]
    assert (
        message("decode/stages/decoder:the_plan_is_printed_and").within(lines[0]) and "embedding and head, 11.6 kB" in lines[0]
    )
    assert ("stage 2", "cpu", "layers 2 to 3: 55.8 kB of weights, 98.3 kB of keys and values") in fast.body.report()
