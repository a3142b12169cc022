"""The decoding benchmark: who is judged wrong, what stands beside what, and that all of it runs."""

import pytest
import torch

from benchmarks import (
    bench_decode,
    decode_adapters,
    decode_draft,
    decode_far,
    decode_host,
    decode_peers,
    decode_prefill,
    decode_speed,
    decode_start,
    decode_turns,
    shapes,
)
from benchmarks.decode_goals import GOALS, Goal
from benchmarks.decode_speed import measure_speed
from benchmarks.harness import Bench
from benchmarks.widened import in_fp32
from gpubound import decoder, device as facts, measure
from gpubound.cli import guarded
from tests.messages import message

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The reference kernels, and 12 new tokens instead of 256."""
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    for module in (decode_adapters, decode_far, decode_host, decode_speed, decode_turns, decode_peers, decode_start):
        monkeypatch.setattr(module, "NEW", 12)


@pytest.fixture
def model():
    return decode_peers.build_model("tiny", CPU)


@pytest.fixture
def bench(tmp_path):
    return Bench("decode", CPU, "gpubound bench decode", folder=tmp_path)


def test_ours_and_the_peers_give_the_same_tokens(model, monkeypatch):
    # The pretend device of other tests in this process is torch's accelerator, and continuous batching asks for streams of it.
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: torch.cpu)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    ids = decode_peers.prompts("tiny", 3, CPU)
    mine = decode_peers.ours(decoder(model, 3, decode_peers.LENGTH))(ids)
    assert mine.shape == (3, 12)
    for peer in ("eager", "graph", "gpt-fast", "continuous"):
        contender = decode_peers.CONTENDERS[peer](model, 3)
        assert torch.equal(contender(ids), mine), peer
        assert torch.equal(contender(ids.flip(0)), mine.flip(0)), f"{peer}, again and with other prompts"


def test_the_gap_tells_chance_from_another_model(model):
    ids = decode_peers.prompts("tiny", 2, CPU)
    tokens = decode_peers.CONTENDERS["eager"](model, 2)(ids)
    assert decode_peers.gap(model, ids, tokens) == 0.0
    assert decode_peers.gap(model, ids, (tokens + 1) % 256) > 2


@pytest.mark.parametrize("sparse", [False, True])
def test_the_judge_computes_in_fp32_and_leaves_the_weights(sparse, monkeypatch):
    if sparse:
        small = shapes.SparseShape(64, 24, 2, 4, 2, 256, False, experts=8, chosen=2)
        monkeypatch.setitem(shapes.SPARSE, "moe", small)
    model = decode_peers.build_model("moe" if sparse else "tiny", CPU, torch.bfloat16)
    ids = decode_peers.prompts("tiny", 1, CPU)
    held = {name: (t.dtype, t.data_ptr()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    with torch.no_grad():
        narrow = model(ids).logits
        with in_fp32(model):
            wide = model(ids).logits
        again = model(ids).logits
    assert {name: (t.dtype, t.data_ptr()) for name, t in [*model.named_parameters(), *model.named_buffers()]} == held
    assert again.equal(narrow) and wide.dtype == torch.float32
    want = model.float()(ids).logits
    torch.testing.assert_close(wide, want, atol=1e-5, rtol=1e-5)
    assert (narrow - want).abs().max() > 1e-3, "bf16 rounds"


def test_ours_beside_peers_budget_and_roofline(bench, model, monkeypatch, capsys):
    monkeypatch.setitem(GOALS, "tiny", Goal({2: (1e-3, 2e-3)}))
    measure_speed(bench, "tiny", model, 2, ["eager", "graph"], rounds=3, read_bytes_per_s=1e12)
    lines = {line.peer_name: line for line in bench.lines}
    assert lines.keys() == {"eager", "graph", "budget", "roofline"} and not bench.wrong
    assert (lines["budget"].gate, lines["budget"].moonshot, lines["budget"].peer) == (1.0, 2.0, 1e-3)
    assert lines["eager"].gate is None and lines["eager"].unit == "tok/s"
    # fp32: 90,432 weights, the head being the embedding; 2 rows of 32 + 6 places, 2 layers of 2 heads of 16 keys and values
    least = 4 * 90_432 + 2 * 38 * 2 * 2 * 16 * 2 * 4
    assert lines["roofline"].peer == pytest.approx(2 * 1e12 / least, rel=1e-3)
    assert message("bench_decode:ours_beside_peers_budget").within(capsys.readouterr().out)


@pytest.mark.slow
def test_a_verified_step_beside_a_plain_one(bench, model):
    bench.dry = True
    decode_draft.measure_draft(bench, "tiny", model, 3)
    lines = {line.peer_name: line for line in bench.lines}
    assert lines.keys() == {"plain step", "looked up"} and {line.unit for line in lines.values()} == {"ms"}
    assert all(line.ours > 0 and line.peer > 0 for line in lines.values())


@pytest.mark.slow
def test_adapters_beside_merged_ones_and_beside_one(bench, monkeypatch):
    monkeypatch.setattr(decode_adapters, "ROWS", 3)
    decode_adapters.measure_adapters(bench, "tiny", rounds=3)
    assert not bench.wrong and [(line.case, line.peer_name, line.gate) for line in bench.lines] == [
        ("tiny batch 1, an adapter of rank 16", "merged", 0.9),
        ("tiny batch 3, each row with its own of 3 adapters", "one adapter", 0.9),
    ]


def test_a_long_prompt_and_its_attention(bench, model, monkeypatch):
    bench.dry = True
    decode_prefill.measure_prefill(bench, "tiny", model, 3)
    assert not bench.wrong and [(line.case, line.peer_name, line.unit, line.gate) for line in bench.lines] == [
        ("tiny attention of 40 tokens in chunks of 10", "SDPA", "TFLOP/s", 0.8),
        ("tiny prefill of 40 tokens", "eager", "tok/s", None),
        ("tiny prefill of 40 tokens", "products", "tok/s", None),
    ]
    # 73,728 weights of blocks; 2 layers of 4 heads of 16, whose tokens attend to 20.5 others on average
    operations = 2 * 40 * 73_728 + 2 * 4 * 40 * 20.5 * 4 * 16
    rate = measure.ceilings(CPU, quick=True).flops_per_s(torch.float32)
    assert bench.lines[2].peer == pytest.approx(40 * rate / operations, rel=1e-3)
    monkeypatch.setattr(decode_prefill, "attend_prompt", lambda q, *_: torch.zeros_like(q.transpose(1, 2)))
    decode_prefill.measure_attention(bench, "tiny", 40, 10, torch.float32)
    assert len(bench.lines) == 3 and "SDPA differ by" in bench.wrong[0]


def test_who_computes_something_else_is_not_timed(bench, model, monkeypatch):
    def broken(model, rows):
        raise RuntimeError("no kernel image\nmore")

    right = decode_peers.CONTENDERS["eager"]
    monkeypatch.setitem(decode_peers.CONTENDERS, "graph", broken)
    monkeypatch.setitem(decode_peers.CONTENDERS, "eager", lambda m, rows: lambda ids: (right(m, rows)(ids) + 1) % 256)
    measure_speed(bench, "tiny", model, 1, ["eager", "graph"], rounds=3, read_bytes_per_s=1e12)
    (wrong,) = bench.wrong
    assert wrong.startswith("tiny batch 1: eager's tokens (1, 12) lie up to ") and wrong.endswith("(limit 0.25); not timed")
    assert bench.unmeasured == [
        message("bench_decode:who_computes_something_e"),
        message("bench_decode:who_computes_something_e.2"),
    ]
    assert not bench.lines and bench.finish() == 1


@pytest.mark.slow
def test_a_dry_run(capsys):
    assert guarded("bench", bench_decode.main, ["--dry", "--parts", "speed", "--batch", "1", "--peers", "graph"]) == 0
    assert capsys.readouterr().out.endswith("decode: 2 lines, nothing kept (dry); 0 of 0 gates hold\n")
