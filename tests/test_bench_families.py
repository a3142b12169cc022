"""The families benchmark: what its models are, who gives which tokens, what stands beside what, and that all of it runs."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_families, decode_peers, decode_turns, families_worker
from benchmarks.bench_families import Budget, Contestants, contest, measure_folder, measure_rows
from benchmarks.families import FAMILIES, build, config_of, layers_of
from benchmarks.harness import Bench
from benchmarks.quantized_folders import FOLDERS
from gpubound import decoder, device as facts
from gpubound.cli import guarded
from gpubound.errors import MeasureError
from gpubound.watch import watch
from gpubound.watch.pretend import simgpu

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
# Billions of weights of the published language models, without parts for images and sounds, and without drafts.
WEIGHTS = {
    "qwen3.5-4b": 4.21, "gemma4-e4b": 7.46, "gpt-oss-20b": 20.91, "glm4-9b": 9.40, "deepseek-v2-lite": 15.71,
    "lfm2-1.2b": 1.17, "nemotron-h-8b": 8.10, "gemma3-4b": 3.88,
}  # fmt: skip
ONE_FAST = [pytest.param(name, marks=[] if name == "glm4-9b" else pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The reference kernels, and 24 new tokens instead of 256: more than a tiny model's window with the prompt."""
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    for module in (bench_families, decode_turns, decode_peers):
        monkeypatch.setattr(module, "NEW", 24)
    monkeypatch.setattr(bench_families.measure, "ceilings", lambda *given, **named: SimpleNamespace(read_bytes_per_s=1e12))


@pytest.fixture
def bench(tmp_path):
    return Bench("families", CPU, "gpubound bench families", dry=True, folder=tmp_path)


def lively(name: str):
    """A tiny model whose tokens vary."""
    model = build(name, CPU, dry=True).eval()
    model.config.use_cache = True
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_models_have_their_published_size(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name, dry=False))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(WEIGHTS[name], abs=6e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_training_case_names_its_layers(name):
    train = FAMILIES[name].train
    if train is not None:
        full, fewer = (config_of(name, dry=False, cut=cut).num_hidden_layers for cut in (False, True))
        assert layers_of(name, train) == ("" if full == fewer else f", {fewer} of {full} layers")


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_FAST)
def test_ours_and_the_captured_forward_give_the_same_tokens(name):
    model = lively(name)
    ids = torch.randint(256, (2, decode_peers.PROMPT), generator=torch.Generator().manual_seed(3))
    mine = decode_peers.ours(decoder(model, 2, decode_peers.LENGTH))(ids)
    graph = decode_peers.CapturedForward(model, 2)
    assert len(mine.unique()) > 3 and torch.equal(graph(ids), mine)
    assert torch.equal(graph(ids.flip(0)), mine.flip(0)), "again, and with other prompts"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pretend device contends with a real one")
@pytest.mark.parametrize("name", ONE_FAST)
def test_a_step_to_capture_never_waits(name, monkeypatch):
    device, model = simgpu(), lively(name)
    if FAMILIES[name].sparse:
        model.set_experts_implementation("batched_mm")  # as for one row on a GPU
    graph = decode_peers.CapturedForward(model.to(device), 1)
    graph._step()
    with watch() as ledger:
        graph._step()
    ledger.assert_within(syncs=0, h2d_bytes=0, d2h_bytes=0)


@pytest.mark.slow
def test_ours_beside_the_captured_forward_and_the_roofline(bench, capsys):
    model = lively("glm4-9b")
    measure_rows(bench, "glm4-9b", model, 1, rounds=3, rate=1e12)
    lines = {line.peer_name: line for line in bench.lines}
    assert lines.keys() == {"graph", "roofline"} and not bench.wrong and not bench.unmeasured
    assert {line.case for line in bench.lines} == {"glm4-9b decode batch 1"} and {line.gate for line in bench.lines} == {None}
    # All weights but the looked-up embedding, and of 44 tokens keys and values: 4 layers of 2 heads of 16, in fp32.
    read = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    assert lines["roofline"].peer == pytest.approx(1e12 / (read + 44 * 4 * 2 * 2 * 16 * 4), rel=1e-3)
    assert "graph's tokens lie 0.000 deviations below the model's own in the mean" in capsys.readouterr().out


@pytest.mark.slow
def test_a_peer_that_fails_or_is_left_out_leaves_the_roofline(bench, monkeypatch):
    def broken(model, rows):
        raise RuntimeError("not permitted when stream is capturing\nmore")

    monkeypatch.setattr(bench_families, "CapturedForward", broken)
    model = lively("glm4-9b")
    measure_rows(bench, "glm4-9b", model, 1, rounds=3, rate=1e12, beside="none")
    assert [line.peer_name for line in bench.lines] == ["roofline"] and not bench.unmeasured
    measure_rows(bench, "glm4-9b", model, 1, rounds=3, rate=1e12)
    assert [line.peer_name for line in bench.lines] == ["roofline"] * 2
    said = "glm4-9b decode batch 1: graph raised RuntimeError: not permitted when stream is capturing"
    assert bench.unmeasured == [said]


@pytest.mark.slow
def test_who_computes_something_else_is_not_timed(bench, monkeypatch):
    right = bench_families.ours
    monkeypatch.setattr(bench_families, "ours", lambda decoder: lambda ids: (right(decoder)(ids) + 1) % 256)
    measure_rows(bench, "glm4-9b", lively("glm4-9b"), 1, rounds=3, rate=1e12)
    (wrong,) = bench.wrong
    assert not bench.lines and wrong.startswith("glm4-9b decode batch 1: ours's tokens (1, 24) lie ")


class Pretend:
    """A contestant's process that answers at once."""

    def __init__(self, facts):
        self.facts = facts

    def ask(self, **wish):
        if self.facts == {}:
            raise MeasureError("its process ended")
        return self.facts.get("seconds") if "steps" in wish else self.facts


def facts_of(loss: float, seconds: float) -> dict:
    return {"loss": loss, "gradient_norm": 1.0, "peak_gib": 1.0, "seconds": seconds}


def test_contestants_agree_and_run_in_turn(tmp_path, capsys):
    bench = Bench("families", CPU, "gpubound bench families", folder=tmp_path)
    case = "glm4-9b, 10 of 40 layers, seq 2048 micro 2 forward+backward"
    contest(bench, "glm4-9b", {"ours": Pretend(facts_of(5.0, 0.1)), "liger": Pretend(facts_of(5.0, 0.13)),
                               "eager": Pretend(facts_of(5.5, 0.2))}, 3)  # fmt: skip
    (line,) = bench.lines
    assert (line.case, line.peer_name, line.ratio, line.gate, line.unit) == (case, "liger", 1.3, 1.25, "tok/s")
    assert line.ours == pytest.approx(4096 / 0.1)
    assert bench.wrong == [f"{case}: loss is 5 in ours, 5.5 in eager (limit 1%); not timed"]
    contest(
        bench, "qwen3.5-4b", {"ours": Pretend(facts_of(5.0, 0.1)), "liger": Pretend({**facts_of(5.0, 0.13), "fla": True})}, 3
    )
    assert (bench.lines[-1].peer_name, bench.lines.pop().gate) == ("liger-fla", 1.25)
    absent, broken = Pretend({"absent": "lfm2"}), Pretend({"error": "OutOfMemoryError: no room"})
    contest(bench, "lfm2-1.2b", {"ours": Pretend(facts_of(5.0, 0.1)), "liger": absent, "eager": broken}, 3)
    case = "lfm2-1.2b, seq 2048 micro 2 forward+backward"
    assert f"{case}: liger has no patch for lfm2\n" in capsys.readouterr().out
    assert bench.unmeasured == [f"{case}: eager raised OutOfMemoryError: no room"] and len(bench.lines) == 1


@pytest.mark.slow
def test_a_process_that_ends_is_reported_and_begun_again(bench, monkeypatch):
    begun = []

    class Process(Pretend):
        def __init__(self, job, module):
            begun.append(job.who)
            super().__init__({} if len(begun) <= 2 else facts_of(5.0, 0.1))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            begun.append("ended")

    monkeypatch.setattr(bench_families, "Worker", Process)
    monkeypatch.setattr(bench_families, "Contestants", lambda bench: contestants)
    contestants = Contestants(bench)
    budget = Budget(bench, 60.0)
    for name in ("glm4-9b", "lfm2-1.2b"):
        budget.spend(f"{name} train", lambda name=name: bench_families.measure_train(bench, name, contestants, 3))
    assert bench.wrong == ["glm4-9b train: raised MeasureError: its process ended"]
    assert sorted(begun) == ["eager", "eager", "ended", "ended", "ours", "ours"] and len(bench.lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.train])
def test_a_placed_model_and_a_plain_one_agree(name):
    first = [families_worker.introduce(*families_worker.contestant(who, name, CPU, True), CPU) for who in ("ours", "eager")]
    assert first[0] == pytest.approx(first[1], rel=1e-4)


def test_what_the_seconds_leave_out_is_reported(capsys):
    assert guarded("bench", bench_families.main, ["--dry", "--only", "glm4-9b", "--seconds=-1"]) == 3
    told = capsys.readouterr().err
    for part in ("decode", "train"):
        assert f"UNMEASURED  glm4-9b {part}: not begun after 0 s; pass --seconds above -1" in told


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_dry_run(capsys):
    assert guarded("bench", bench_families.main, ["--dry", "--only", "lfm2-1.2b"]) == 0
    assert capsys.readouterr().out.endswith("families: 3 lines, nothing kept (dry); 0 of 0 gates hold\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_a_quantised_folder_is_written_read_and_decoded(bench, name, capsys):
    measure_folder(bench, name, [2], rounds=3)
    (line,) = bench.lines
    assert not bench.wrong and (line.case, line.peer_name) == (f"{name} decode batch 2", "roofline")
    assert "ours's tokens lie 0.000 deviations below the model's own" in capsys.readouterr().out
