"""`gpubound bench rl`: everyone has the same prompts, learning alone is a run's, and a dry run has a line for each gate."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks import bench_rl, rl_worker
from benchmarks.finetune_worker import tokenizer
from benchmarks.shapes import QWEN3, qwen3_config
from gpubound.cli import guarded

ROLLOUTS = [f"{what}{how}" for what in ("rollouts", "prefill") for how in ("", "-exact")]


def test_each_contender_is_known():
    assert {*bench_rl.PEERS, "loop", "loop-not-exact", "learning", *ROLLOUTS} == set(rl_worker.CONTENDERS)
    for job in (bench_rl.CASES | bench_rl.TINY).values():
        assert job.seq == job.prompt + job.new and job.micro * job.accumulate == job.prompts * job.samples
        assert job.micro % job.samples == 0 or job.samples % job.micro == 0


def test_qwen3_has_the_published_number_of_parameters():
    transformers = pytest.importorskip("transformers")
    for name, wanted in (("0.6b", 596_049_920), ("1.7b", 1_720_574_976)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(qwen3_config(QWEN3[name], 64))
        assert sum(p.numel() for p in model.parameters()) == wanted
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2]
        assert QWEN3[name].matrix_params == sum(p.numel() for p in matrices)


def test_prompts_have_one_length():
    pytest.importorskip("transformers")
    job, encoder = bench_rl.SMALL, tokenizer(bench_rl.SMALL)
    assert {len(encoder(text).input_ids) for text in rl_worker.texts(job)} == {job.prompt}
    assert rl_worker.even([[2, 4, 5, 7], [8], []]) == [0.5, 1.0, 0.0]


def lines(monkeypatch, found: dict) -> dict:
    """What bench rl keeps of figures like these, by case and peer."""
    monkeypatch.setattr(bench_rl, "facts", lambda bench, name, job, who: found.get(who))
    monkeypatch.setattr(bench_rl, "learning_alone", lambda *_: nullcontext(lambda: found.get("learning")))
    kept = []
    monkeypatch.setattr(bench_rl.Bench, "finish", lambda bench: kept.extend(bench.lines))
    bench_rl.main(["--dry"])
    return {(one.case, one.peer_name): (one.unit, one.ours, one.peer, one.ratio, one.gate) for one in kept}


def test_the_gates_are_those_that_were_asked_for(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench_rl, "TINY", {"0.6b": replace(bench_rl.SMALL, samples=8)})
    phases = {"sample": 3.0, "reward": 0.0, "learn": 1.0}
    run = {"seconds": 4.0, "phases": phases, "tokens": 1e5, "gap": 0.0, "largest_gap": 0.0, "peak_gib": 24.0}
    found = {
        "rollouts": {"rates": {"256": [9e4], "512": [5e4], "geometric": [4e4], "own": [3e4]}, "mean": 256.0, "syncs": 2},
        "rollouts-exact": {"rates": {"256": [6e4], "512": [4e4], "geometric": [3e4], "own": [2e4]}},
        "prefill": {"64": {"ours": [1.1], "one sample": [1.0]}}, "prefill-exact": {"64": {"ours": [1.2], "one sample": [1.0]}},
        "loop": run, "loop-not-exact": run | {"seconds": 3.0, "gap": 0.03, "largest_gap": 0.2},
        "trl": run | {"seconds": 40.0, "peak_gib": 60.0},
        "learning": {"seconds": 0.5, "peak_gib": 20.0, "syncs": 0},
    }  # fmt: skip
    kept = lines(monkeypatch, found)
    assert kept["0.6b rollout, 256 tokens a row", "budget"][2:] == pytest.approx((95e3, 90 / 95, 1.0), rel=1e-4)
    assert kept["0.6b rollout, 512 tokens a row", "budget"][4] is None
    assert kept["0.6b rollout, geometric lengths", "equal lengths"] == ("tok/s", 4e4, 5e4, 0.8, 0.85)
    assert kept["0.6b rollout, geometric lengths, one sample a prompt", "equal lengths"][4] is None
    assert kept["0.6b rollout host syncs", "budget"] == ("syncs", 2, 0, 0.0, 1.0)
    assert kept["0.6b prefill of 64 tokens for 8 samples", "one sample"][3:] == pytest.approx((1 / 1.1, 1 / 1.15), rel=1e-4)
    assert kept["0.6b exact prefill of 64 tokens for 8 samples", "one sample"][3] == pytest.approx(1 / 1.2, rel=1e-4)
    assert kept["0.6b exact rollout, 256 tokens a row", "not exact"] == (
        "tok/s",
        6e4,
        9e4,
        pytest.approx(2 / 3, rel=1e-4),
        None,
    )
    assert kept["0.6b gap", "budget"] == ("nats", 0.0, 0.0, 1.0, 1.0)
    assert kept["0.6b gap, not exact", "budget"] == ("nats", 0.03, 1e-3, 0.0, None)
    assert kept["0.6b step, exact", "not exact"] == ("s", 4.0, 3.0, 0.75, 1 / 1.3)
    assert kept["0.6b step", "trl"] == ("s", 4.0, 40.0, 10.0, 8.0)
    assert kept["0.6b step", "training alone"] == ("s", 4.0, 0.5, 0.125, None)
    assert kept["0.6b step, reward", "trl"][3] == 1.0  # nobody waited
    assert kept["0.6b step peak memory", "training alone"][1:] == pytest.approx((24.0, 20.0, 1 / 1.2, 1 / 1.2), rel=1e-4)
    assert kept["0.6b step peak memory", "trl"] == ("GiB", 24.0, 60.0, 2.5, None)
    assert kept["0.6b learning host syncs", "budget"] == ("syncs", 0, 0, 1.0, 1.0)
    failed = lines(monkeypatch, {"rollouts": found["rollouts"], "loop": run})
    assert not any("step" in case or "exact" in case for case, _ in failed) and len(failed) == 5


def test_a_line_is_printed_before_the_next_contender_is_measured(monkeypatch, capsys):
    run = {"seconds": 4.0, "phases": {"sample": 3.0, "reward": 0.0, "learn": 1.0}, "tokens": 1e5, "peak_gib": None}
    seen = []

    def measured(each):
        seen.append(capsys.readouterr().out)
        return each

    bench = bench_rl.Bench("rl", torch.device("cpu"), "", dry=True)
    learning = {"seconds": 0.5, "peak_gib": None, "syncs": None}
    peers = {name: lambda: measured(run) for name in ("trl", "trl-continuous")}
    bench_rl.keep_step(bench, "0.6b", run, lambda: measured(learning), peers=peers)
    assert [line in printed for line, printed in zip(("ours: a step", "beside it alone", "trl: a step"), seen)] == [True] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_peer_that_is_late_is_told(capfd, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(bench_rl, "TINY", {"tiny": replace(bench_rl.SMALL, limit=0.01)})
    monkeypatch.setattr(bench_rl, "learning_alone", lambda *_: nullcontext())
    monkeypatch.setattr(bench_rl, "keep_step", lambda *_, peers: peers["trl"]())
    monkeypatch.setattr(bench_rl, "facts", _only("trl", bench_rl.facts))
    assert guarded("bench", bench_rl.main, ["--dry", "--parts", "step"]) == 3
    assert "no step has ended within 0 s; give a longer --limit" in capfd.readouterr().err


def _only(name, facts):
    return lambda bench, case, job, who: facts(bench, case, job, who) if who == name else {"found": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("name", "options"), [("tiny", ["--peers", "none"]), ("tiny-lora", ["--parts", "step"])], ids=["all weights", "adapters"]
)
def test_a_dry_run(name, options, capsys, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(bench_rl, "TINY", {name: bench_rl.TINY[name]})
    assert guarded("bench", bench_rl.main, ["--dry", *options]) == 0
    out = capsys.readouterr().out
    wanted = (
        ["rollout, geometric lengths", "prefill of 9 tokens for 2 samples", "gap, not exact"]
        if name == "tiny"
        else ["trl: a step of"]
    )
    for case in [*wanted, "step, learning beside it alone"]:
        assert f"{name} {case}" in out
