"""The DeepSeek-V4 benchmark: that its parts run, what stands beside what, and who is not timed."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_deepseek
from benchmarks.bench_deepseek import DRY, measure_step
from benchmarks.deepseek_models import build_model, v4_config
from benchmarks.harness import Bench
from gpubound import device as facts
from gpubound.cli import guarded
from tests.messages import message

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The reference kernels, and a ceiling that nobody measures."""
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    monkeypatch.setattr(bench_deepseek.measure, "ceilings", lambda *given, **named: SimpleNamespace(read_bytes_per_s=1e12))


@pytest.fixture
def bench(tmp_path):
    return Bench("deepseek", CPU, "gpubound bench deepseek", dry=True, folder=tmp_path)


@pytest.mark.slow
def test_a_step_beside_its_peers_and_gates(bench, monkeypatch):
    monkeypatch.setattr(bench_deepseek, "captured", lambda *given: 0.01)
    monkeypatch.setattr(bench_deepseek, "own_forward", lambda *given: 0.3)
    measure_step(bench, build_model(CPU, dry=True), DRY, rounds=3)
    lines = {(line.case.partition(", half of Flash batch 1")[2], line.peer_name): line for line in bench.lines}
    assert not bench.wrong and {key: line.gate for key, line in lines.items()} == {
        ("", "uncaptured"): None,
        ("", "eager"): 10.0,
        ("", "roofline"): 0.25,
        (", host time a token, 8 a launch", "budget"): 1.0,
        (", host time a token, 8 a launch, the device at work", "budget"): None,
    }
    assert (lines["", "eager"].ours, lines["", "eager"].ratio) == (100.0, 30.0)


@pytest.mark.slow
def test_a_step_that_computes_something_else_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(bench_deepseek, "gaps", lambda *given, wide: torch.full([2], 4.0))
    measure_step(bench, build_model(CPU, dry=True), DRY, rounds=3)
    assert not bench.lines and bench.wrong == [message("bench_deepseek:a_step_that_computes_som")]


def test_the_model_that_is_measured():
    """19.5 billion weights, layers in V4-Flash's order; on meta, for they take 39 GB."""
    from transformers import DeepseekV4ForCausalLM

    config = v4_config(dry=False)
    assert [config.layer_types.count(kind) for kind in dict.fromkeys(config.layer_types)] == [2, 21, 20]
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(19.5e9, rel=0.01)


def test_a_dry_run_of_the_small_parts(capsys):
    assert guarded("bench", bench_deepseek.main, ["--dry", "--parts", "streams"]) == 0
    said = capsys.readouterr().out
    assert message("bench_deepseek:a_dry_run_of_the_small_p").within(said) and message(
        "bench_deepseek:a_dry_run_of_the_small_p.2"
    ).within(said)
