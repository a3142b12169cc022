"""The decoding benchmark: who is judged wrong, what stands beside what, and that all of it runs."""

import subprocess
import threading
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    bench_decode,
    decode_adapters,
    decode_cache,
    decode_far,
    decode_first,
    decode_host,
    decode_peers,
    decode_speed,
    decode_stages,
    decode_start,
    decode_turns,
    shapes,
)
from benchmarks.decode_goals import GOALS, Goal
from benchmarks.decode_host import busy, host_us
from benchmarks.decode_speed import measure_speed
from benchmarks.harness import Bench
from benchmarks.widened import in_fp32
from gpubound import decoder, device as facts, measure
from gpubound.cli import guarded
from gpubound.errors import MeasureError
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


def test_ours_and_the_peers_give_the_same_tokens(model):
    ids = decode_peers.prompts("tiny", 3, CPU)
    mine = decode_peers.ours(decoder(model, 3, decode_peers.LENGTH))(ids)
    assert mine.shape == (3, 12)
    for peer in ("eager", "graph", "gpt-fast"):
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


@pytest.mark.parametrize("where", ["model.layers.1.mlp", "model.norm", "lm_head"])
def test_the_judge_leaves_the_weights_of_a_forward_that_raises(where):
    model = decode_peers.build_model("tiny", CPU, torch.bfloat16)
    ids = decode_peers.prompts("tiny", 1, CPU)
    want = model(ids).logits

    def broken(*_):
        raise RuntimeError("no memory")

    handle = model.get_submodule(where).register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="no memory"), in_fp32(model):
        model(ids)
    handle.remove()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model(ids).logits.equal(want)
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not [hook for hook in hooks if "widened" in hook.__module__], "none stays"


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


def test_a_mixture_of_experts_beside_its_own_forward(bench, monkeypatch):
    small = shapes.SparseShape(64, 24, 2, 4, 2, 256, False, experts=8, chosen=2)
    monkeypatch.setitem(shapes.SPARSE, "moe", small)
    model = decode_peers.build_model("moe", CPU)
    measure_speed(bench, "moe", model, 2, ["eager"], rounds=3, read_bytes_per_s=1e12)
    lines = {line.peer_name: line for line in bench.lines}
    assert lines.keys() == {"eager", "roofline"} and not bench.wrong
    assert small.matrix_params == 2 * (3 * 64 * 64 + 2 * 64 * 24 * 3 + 64 * 8) + 256 * 64
    # two rows choose 3.5 different experts on average, one row 2; 5 norms of the stream, and 2 of the heads in each layer
    least = 4 * (small.matrix_params + 2 * 1.5 * 3 * 64 * 24 + 5 * 64 + 4 * 16) + 2 * 38 * 2 * 2 * 16 * 2 * 4
    assert lines["roofline"].peer == pytest.approx(2 * 1e12 / least, rel=1e-3)


def test_caches_beside_a_plain_one(bench, model, monkeypatch):
    for name, value in (("ROWS", 2), ("PLACES", 20), ("NEW", 12)):
        monkeypatch.setattr(decode_cache, name, value)
    decode_cache.measure_cache(bench, "tiny", model, rounds=3, read_bytes_per_s=1e12)
    assert sorted({line.case for line in bench.lines}) == [
        f"tiny batch 2 at 20 tokens, {form} cache" for form in ("fp8", "int8", "paged")
    ]
    lines = {(line.case.split()[-2], line.peer_name): line for line in bench.lines}
    # fp32: the weights, then 2 rows of 14 places, 2 layers of 2 heads of 16 keys and values, in 8 bits with a scale of 4 bytes
    least = 4 * 90_432 + 2 * 14 * 2 * 2 * 2 * (16 + 4)
    assert lines["int8", "roofline"].peer == lines["fp8", "roofline"].peer == pytest.approx(2 * 1e12 / least, rel=1e-3)
    least += 2 * 14 * 2 * 2 * 2 * (64 - 20)
    assert lines["paged", "roofline"].peer == pytest.approx(2 * 1e12 / least, rel=1e-3)


def test_behind_a_long_text(bench, model, monkeypatch):
    monkeypatch.setattr(decode_far, "TEXT", 20)
    monkeypatch.setitem(GOALS, "tiny", Goal(far=(100, 200)))
    decode_far.measure_far(bench, "tiny", model, rounds=3, read_bytes_per_s=1e12)
    (line,) = (line for line in bench.lines if line.peer_name == "budget")
    assert (line.case, line.gate, line.moonshot, line.peer) == (message("bench_decode:behind_a_long_text"), 1.0, 2.0, 100.0)
    monkeypatch.setattr(decode_far, "gap", lambda *given: 4.0)
    decode_far.measure_far(bench, "tiny", model, rounds=3, read_bytes_per_s=1e12)
    assert bench.wrong == [message("bench_decode:behind_a_long_text.2")]


def test_adapters_beside_merged_ones_and_beside_one(bench, monkeypatch):
    monkeypatch.setattr(decode_adapters, "ROWS", 3)
    decode_adapters.measure_adapters(bench, "tiny", rounds=3)
    assert not bench.wrong and [(line.case, line.peer_name, line.gate) for line in bench.lines] == [
        ("tiny batch 1, an adapter of rank 16", "merged", 0.9),
        ("tiny batch 3, each row with its own of 3 adapters", "one adapter", 0.9),
    ]


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


def test_the_hosts_time_leaves_the_waiting_out(model, monkeypatch):
    """By a clock of our own: a launch of 20 ms is waiting; the 10 ms that stand between two launches are not."""
    now = [0.0]
    monkeypatch.setattr(decode_host, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def taking(seconds, work):
        def slow(*what):
            now[0] += seconds
            return work(*what)

        return slow

    made = decoder(model, 1, decode_peers.LENGTH)
    receive = made.slots.receive
    made.graphs.launch = taking(0.02, made.graphs.launch)
    made.slots.receive = taking(0.01, receive)
    assert host_us(made, [[1, 2, 3]], 1) * decode_host.HOST_K == pytest.approx(10_000)
    made.slots.receive = receive
    assert host_us(made, [[1, 2, 3]], 1) == pytest.approx(0, abs=1e-6)


def test_busy_threads_end():
    before = set(threading.enumerate())
    with busy(2):
        assert len(set(threading.enumerate()) - before) == 2
    assert not set(threading.enumerate()) - before


def test_a_fresh_process_tells_what_it_found(monkeypatch):
    """Its main here, where 12 tokens are enough; the process that fails by its sentence."""
    found = decode_start.main("tiny", CPU)
    assert found["path"] == "" and 0 < found["built_s"] < found["first_token_s"] and "syncs" not in found
    ended = subprocess.CompletedProcess([], 7, stdout="killed\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: ended)
    with pytest.raises(MeasureError) as error:
        decode_first.started("tiny", CPU, "cache")
    assert str(error.value) == message("bench_decode:a_fresh_process_tells_wh")


def test_what_start_found_becomes_lines(bench, monkeypatch):
    told = {"first_token_s": 0.5, "built_s": 0.4, "path": "", "beyond_bytes": 50e6, "syncs": 1}
    monkeypatch.setattr(decode_first, "started", lambda *what: told)
    decode_first.measure_start(bench, "350m")
    found = {(line.case.removeprefix("350m "), line.unit): (line.ratio, line.gate) for line in bench.lines}
    assert found == {
        ("first token, fresh process, empty Triton cache", "s"): (2.0, None),
        ("first token, fresh process, filled Triton cache", "s"): (2.0, 1.0),
        ("host syncs in a generation", "syncs"): (0.0, 1.0),
        ("memory beyond weights and cache", "GiB"): (2.0, 1.0),
    }


def test_on_the_cpu_by_medians_and_by_best_rounds(bench, monkeypatch):
    """The rounds of a pretended clock: ours take 1, 2 and 6 s, theirs 4, 3 and 9."""
    monkeypatch.setattr(
        decode_speed, "take_turns", lambda works, ids, rounds: {"ours": [1.0, 2.0, 6.0], "eager": [4.0, 3.0, 9.0]}
    )
    decode_speed.measure_cpu(bench, "tiny", [2], rounds=3, read_bytes_per_s=1e12)
    lines = {(line.case, line.peer_name): (line.ours, line.ratio) for line in bench.lines if line.peer_name != "roofline"}
    assert not bench.wrong and lines == {
        (f"tiny {dtype} on the CPU batch 2{end}", "eager"): found
        for dtype in ("float32", "bfloat16")
        for end, found in (("", (12.0, 1.5)), (", best round", (24.0, 3.0)))
    }
    here = measure.machine()
    assert {line.gpu for line in bench.lines} == {f"{here.cpu}, {here.threads} threads"}


def test_the_part_of_the_cpu_needs_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(decode_speed, "build_model", lambda name, device, dtype: pytest.fail(name))
    with pytest.raises(pytest.fail.Exception, match="135m"):
        guarded("bench", bench_decode.main, ["--parts", "cpu"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--only", "2b"], "--only: got '2b', wanted some of 135m, 350m, 1b, 8b, moe, tiny."),
        (["--peers", "vllm"], "--peers: got 'vllm', wanted some of eager, graph, compile, gpt-fast."),
        (
            ["--parts", "end"],
            "--parts: got 'end', wanted some of start, speed, far, packed, cache, adapters, host, stages, cpu.",
        ),
        (["--parts", "speed,cpu"], "--parts: cpu is measured by itself; leave the others out."),
        (["--batch", "1,x"], "--batch: got 'x', wanted batch sizes by comma, such as 1,32."),
        (["--rounds", "2"], "--rounds: got 2, wanted at least 3, or there is no median to speak of."),
    ],
)
def test_what_is_refused(capsys, options, sentence):
    assert guarded("bench", bench_decode.main, ["--dry", *options] if "--only" not in options else options) == 2
    assert capsys.readouterr().err == f"gpubound bench: {sentence}\n"


def test_stages_beside_one_device(capsys, monkeypatch):
    monkeypatch.setattr(decode_stages, "NEW", 12)
    monkeypatch.setattr(decode_stages, "ROWS", 4)
    assert guarded("bench", bench_decode.main, ["--dry", "--parts", "stages"]) == 0
    said = capsys.readouterr().out
    assert (
        all(message("bench_decode:stages_beside_one_device", rows).within(said) for rows in (1, 4, 8))
        and "decode: 4 lines" in said
    )
    assert message("bench_decode:stages_beside_one_device.2").within(said)


def test_a_dry_run(capsys):
    assert guarded("bench", bench_decode.main, ["--dry", "--parts", "speed", "--batch", "1", "--peers", "graph"]) == 0
    assert capsys.readouterr().out.endswith("decode: 2 lines, nothing kept (dry); 0 of 0 gates hold\n")
