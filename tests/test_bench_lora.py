"""`gpubound bench lora`: everyone trains the same adapters on the same data, and who learns otherwise is not timed."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks import bench_lora, lora_linear, lora_train, workers
from benchmarks.harness import Bench
from benchmarks.lora_linear import Drawn, measure_linear
from benchmarks.lora_train import TINY, differs
from benchmarks.lora_worker import BASES, CONTENDERS, freeze
from benchmarks.results import FLOOR
from benchmarks.shapes import SHAPES
from benchmarks.train_worker import llama, usual
from gpubound import device as facts
from gpubound.cli import guarded

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:transformers"
)  # PEFT asks for a name that transformers has renamed
CPU = torch.device("cpu")


@pytest.fixture
def on_definitions(monkeypatch):
    """As in a worker's process, which is never in Triton's interpreter."""
    monkeypatch.setattr(facts, "interpreted", lambda: False)


@pytest.fixture
def bench(tmp_path):
    return Bench("lora", CPU, "gpubound bench lora", dry=True, folder=tmp_path)


# --- whole steps ---


@cache
def run(who, steps=6, **changes):
    """The losses of a contender in this process."""
    step = CONTENDERS[who](replace(TINY["tiny"], **changes).job(who, "cpu")).start()
    return [step().item() for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.usefixtures("on_definitions")
def test_all_contenders_learn_alike():
    """Also when the adapters are PEFT's own; and with half the rate not."""
    ours = run("ours")
    assert ours[-1] < ours[0] - 0.005
    for who in ("ours-peft", "peft", "peft-autocast"):
        assert differs(ours, run(who)) is None, who
    assert differs(ours, run("peft", lr=lora_train.LR / 2)) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("on_definitions")
@pytest.mark.parametrize("base", BASES)
def test_a_base_in_fewer_bits(base):
    """Another model than the one in bf16, and the same as the one beside it without adapters."""
    ours, floor = run(f"ours-{base}"), run(f"floor-{base}", steps=1)
    assert differs(ours, run("ours"), alike=False) is None
    assert ours[0] == pytest.approx(floor[0], rel=1e-5) and ours[0] != run("floor", steps=1)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("on_definitions")
def test_each_row_has_an_adapter_of_its_own():
    """The model begins as with one adapter, and eight, each with a row to itself, learn more from a step than one from all."""
    one, eight = run("ours"), run("ours-rows")
    assert differs(eight, one, alike=False) is None and differs(eight, one) is not None
    assert eight[0] == pytest.approx(one[0], rel=1e-5)


@pytest.mark.usefixtures("on_definitions")
def test_the_floor_has_dx_of_every_layer_and_one_small_gradient():
    """The first norm's gain, at the bottom of the model, trains as in plain torch."""
    job = replace(TINY["tiny"], lr=0.1).job("floor", "cpu")
    model = freeze(llama(job, torch.float32))
    (gain,) = [p for p in model.parameters() if p.requires_grad]
    assert gain.numel() == SHAPES["tiny"].hidden
    plain = usual(job, model).start()
    want = [plain().item() for _ in range(3)]
    assert abs(want[0] - want[2]) > 2e-3
    assert run("floor", steps=3, lr=0.1) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs", "same_work", "agree"),
    [
        ([7.0, 6.5, 6.0], [7.0, 6.5, 6.04], True, True),
        ([7.0, 6.5, 6.0], [7.0, 6.8, 6.1], True, False),
        ([7.1, 6.5, 6.1], [7.0, 6.5, 6.0], True, False),
        ([7.0, 7.0, 7.0], [7.0, 6.5, 6.0], True, False),
        ([7.0, 6.5, 6.0], [7.0, 7.0, 7.0], True, False),
        ([7.0, 6.5, float("nan")], [7.0, 6.5, 6.0], True, False),
        ([7.0, 7.1, 7.2], [7.0, 7.1, 7.2], True, False),  # nobody learned, so nothing is shown
        # Who computes another thing begins alike, and learns.
        ([7.05, 6.0], [7.0, 6.8], False, True),
        ([7.2, 6.0], [7.0, 6.0], False, False),
        ([7.0, 7.0], [7.0, 6.0], False, False),
        ([7.0, 6.0], [7.0, 7.1], False, False),
        ([float("nan"), 6.0], [7.0, 6.0], False, False),
    ],
)
def test_who_learns_otherwise(ours, theirs, same_work, agree):
    assert (differs(ours, theirs, alike=same_work) is None) == agree


# --- one layer ---


def test_the_floor_is_the_layer_without_its_adapter():
    drawn = Drawn(lora_linear.TINY[0], CPU, torch.float32)
    with torch.no_grad():
        drawn.b.zero_()
    y, dx, _, _ = drawn.ours()
    for got, want in zip(drawn.floor(), (y, dx)):
        torch.testing.assert_close(got.view_as(want), want.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", lora_linear.DTYPES)
def test_lines_of_a_layer(bench, dtype):
    shape = lora_linear.TINY[0]
    measure_linear(bench, shape, dtype, ["peft"])
    assert not bench.wrong
    name = f"linear 2x8x32 r4, {dtype} adapters"
    assert {(line.case, line.peer_name): (line.gate, line.moonshot) for line in bench.lines} == {
        (name, "peft"): (None, None),
        (name, FLOOR): (1 / 1.9, 1 / 1.5),
        (f"{name}, eager", "peft"): (None, None),
    }


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own import
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", lora_linear.DTYPES)
def test_a_captured_layer(tmp_path, dtype):
    bench = Bench("lora", torch.device("cuda", 0), "gpubound bench lora", dry=True, folder=tmp_path)
    measure_linear(bench, lora_linear.Linear(2, 64, 256, 16, (1.9, 1.5)), dtype, ["peft"])
    assert not bench.wrong and not bench.unmeasured and {line.peer_name for line in bench.lines} == {"peft", FLOOR}


def test_an_adapter_that_is_computed_wrongly_is_not_timed(bench, monkeypatch):
    right = Drawn._layer

    def other(self):
        layer, trained = right(self)
        layer.scaling["default"] = 1.0
        return layer, trained

    monkeypatch.setattr(Drawn, "_layer", other)
    measure_linear(bench, lora_linear.TINY[0], "fp32", ["peft"])
    assert bench.wrong[0].startswith("linear 2x8x32 r4, fp32 adapters: ours and peft differ by ")


# --- the command ---


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_a_dry_run_of_whole_steps(capfd, monkeypatch):
    monkeypatch.setattr(workers, "SAMPLE_S", 0.01)
    assert guarded("bench", bench_lora.main, ["--dry", "--parts", "train"]) == 0
    said = capfd.readouterr().out
    assert "tiny: LoRA step = " in said and said.endswith("lora: 5 lines, nothing kept (dry); 2 of 2 gates hold\n")
