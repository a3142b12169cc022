"""`gpubound bench rl`: everyone has the same prompts, learning alone is a run's, and a dry run has a line for each gate."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from benchmarks import bench_rl, rl_worker
from benchmarks.finetune_worker import tokenizer
from benchmarks.shapes import QWEN3, qwen3_config
from gpubound.cli import guarded

ROLLOUTS = [f"{what}{how}" for what in ("rollouts", "prefill") for how in ("", "-exact")]


def test_each_contender_is_known():
    assert {*bench_rl.PEERS, "loop", "loop-not-exact", *ROLLOUTS} == set(rl_worker.CONTENDERS)
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


class Found(bench_rl.Contenders):
    """Contenders that have measured this already, by who and wish. None of them fails but those that are not here."""

    found: ClassVar[dict] = {}

    def __init__(self, bench, jobs, whos):
        self.workers = {}

    def ask(self, name, who, **wish):
        measured = self.found.get(who)
        return measured[next(iter(wish.values()))] if measured and wish else measured


def lines(monkeypatch, found: dict, *options: str) -> dict:
    """What bench rl keeps of figures like these, by case and peer."""
    monkeypatch.setattr(bench_rl, "Contenders", Found)
    monkeypatch.setattr(Found, "found", found)
    kept = []
    monkeypatch.setattr(bench_rl.Bench, "finish", lambda bench: kept.extend(bench.lines))
    bench_rl.main(["--dry", *options])
    return {(one.case, one.peer_name): (one.unit, one.ours, one.peer, one.ratio, one.gate) for one in kept}


STEP = {
    "seconds": 4.0,
    "phases": {"sample": 3.0, "reward": 0.0, "learn": 1.0},
    "tokens": 1e5,
    "gap": 0.0,
    "largest_gap": 0.0,
    "peak_gib": 24.0,
    "alone": {"peak_gib": 20.0, "syncs": 0},
}


def test_the_gates_are_those_that_were_asked_for(monkeypatch):
    pytest.importorskip("transformers")
    job = replace(bench_rl.SMALL, samples=8, equal=(128, 256, 512), lengths=(64,))
    monkeypatch.setattr(bench_rl, "TINY", {"0.6b": job})
    found = {
        "rollouts": {"128": [2e5], "256": [9e4], "512": [5e4], "geometric": [4e4], "own": [3e4], "mean": 256.0, "syncs": 2},
        "rollouts-exact": {"256": [6e4], "512": [4e4]},
        "prefill": {64: {"ours": [1.1], "one sample": [1.0]}},
        "prefill-exact": {64: {"ours": [1.2], "one sample": [1.0]}},
        "loop": STEP,
        "loop-not-exact": STEP | {"seconds": 3.0, "gap": 0.03, "largest_gap": 0.2},
        "trl": STEP | {"seconds": 40.0, "peak_gib": 60.0},
    }
    kept = lines(monkeypatch, found)
    assert kept["0.6b rollout, 256 tokens a row", "budget"][2:] == pytest.approx((95e3, 90 / 95, 1.0), rel=1e-4)
    assert kept["0.6b rollout, 512 tokens a row", "budget"][4] is None
    assert kept["0.6b rollout, geometric lengths", "equal lengths"] == ("tok/s", 4e4, 5e4, 0.8, 0.85)
    assert kept["0.6b rollout, geometric lengths, one sample a prompt", "equal lengths"][4] is None
    assert kept["0.6b rollout host syncs", "budget"] == ("syncs", 2, 0, 0.0, 1.0)
    assert kept["0.6b prefill of 64 tokens for 8 samples", "one sample"][3:] == pytest.approx((1 / 1.1, 1 / 1.15), rel=1e-4)
    assert kept["0.6b exact prefill of 64 tokens for 8 samples", "one sample"][3] == pytest.approx(1 / 1.2, rel=1e-4)
    exact = "tok/s", 6e4, 9e4, pytest.approx(2 / 3, rel=1e-4), None
    assert kept["0.6b exact rollout, 256 tokens a row", "not exact"] == exact
    assert kept["0.6b gap", "budget"] == ("nats", 0.0, 0.0, 1.0, 1.0)
    assert kept["0.6b gap, not exact", "budget"] == ("nats", 0.03, 1e-3, 0.0, None)
    assert kept["0.6b step, exact", "not exact"] == ("s", 4.0, 3.0, 0.75, 1 / 1.3)
    assert kept["0.6b step", "trl"] == ("s", 4.0, 40.0, 10.0, 8.0)
    assert kept["0.6b step", "its learning"] == ("s", 4.0, 1.0, 0.25, None)
    assert kept["0.6b step, reward", "trl"][3] == 1.0  # nobody waited
    assert kept["0.6b step peak memory", "training alone"][1:] == pytest.approx((24.0, 20.0, 1 / 1.2, 1 / 1.2), rel=1e-4)
    assert kept["0.6b step peak memory", "trl"] == ("GiB", 24.0, 60.0, 2.5, None)
    assert kept["0.6b learning host syncs", "budget"] == ("syncs", 0, 0, 1.0, 1.0)
    failed = lines(monkeypatch, {"rollouts": found["rollouts"], "loop": STEP})
    assert not any("exact" in case or "trl" in peer for case, peer in failed) and len(failed) == 9


def test_a_line_is_printed_before_the_next_case_is_measured(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench_rl, "TINY", {"one": bench_rl.SMALL, "two": bench_rl.SMALL})
    printed = {}

    def ask(self, name, who, **wish):
        printed[name] = capsys.readouterr().out
        return STEP

    monkeypatch.setattr(Found, "ask", ask)
    lines(monkeypatch, {}, "--parts", "step", "--peers", "none")
    assert "one step peak memory" in printed["two"]


def test_others_stand_still_while_one_measures(monkeypatch):
    events = []

    class Worker:
        def __init__(self, job, module, wait):
            self.who, self.process = job.who, self

        def send_signal(self, number):
            events.append((self.who, number.name))

        def hear_facts(self):
            events.append((self.who, "ready"))

        def ask(self):
            events.append((self.who, "measures"))
            raise bench_rl.MeasureError("its process ended")

    monkeypatch.setattr(bench_rl, "Worker", Worker)
    bench = bench_rl.Bench("rl", torch.device("cpu"), "", dry=True)
    contenders = bench_rl.Contenders(bench, {"tiny": bench_rl.SMALL}, ("loop", "trl"))
    assert contenders.ask("tiny", "loop") is None
    assert events == [("loop", "ready"), ("trl", "SIGSTOP"), ("loop", "measures"), ("trl", "SIGCONT")]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_peer_that_is_late_is_told(capfd, monkeypatch):
    pytest.importorskip("trl")
    bench = bench_rl.Bench("rl", torch.device("cpu"), "", dry=True)
    with bench_rl.Contenders(bench, {"tiny": replace(bench_rl.SMALL, limit=0.01)}, ("trl",)) as contenders:
        assert contenders.ask("tiny", "trl") is None and contenders.ask("tiny", "trl") is None
    assert len(bench.unmeasured) == 1 and "no step has ended within 0 s; give a longer --limit" in capfd.readouterr().err


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
        else ["step, trl"]
    )
    for case in [*wanted, "step, ours"]:
        assert f"{name} {case}" in out
