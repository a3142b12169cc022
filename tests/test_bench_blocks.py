"""`gpubound bench blocks`: plain forms compute what ours do, what does not is not timed, lines and gates, what is refused."""

import pytest
import torch

from benchmarks import bench_blocks, block_parts
from benchmarks.bench_blocks import beside_cpu, in_turn, layers, measure_layer, measure_poly
from benchmarks.block_parts import TINY, Layer
from benchmarks.block_steps import measure_steps
from benchmarks.harness import Bench
from gpubound import device as facts
from gpubound.cli import guarded

CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path):
    return Bench("blocks", CPU, "gpubound bench blocks", dry=True, folder=tmp_path)


@pytest.fixture
def on_definitions(monkeypatch):
    monkeypatch.setattr(facts, "interpreted", lambda: False)


@pytest.mark.usefixtures("on_definitions")
@pytest.mark.parametrize("name", layers())
def test_plain_forms_are_ours_in_fp64(name):
    layer = Layer(*layers()[name], TINY, "cpu", torch.float64)
    for got, want in zip(layer.work(layer.ours)(), layer.work(layer.plain)(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # angles are fp32's


@pytest.mark.usefixtures("on_definitions")
def test_lines_and_gates(bench):
    layer = Layer("mlp", ("swiglu",), TINY, "cpu", torch.float32)
    beside_cpu(bench, "swiglu glu", layer, "glu")
    measure_layer(bench, "richards_glu", layer, ["eager"])  # whose gates they are
    measure_poly(bench, 32, 16, ["eager"])
    measure_steps(bench, in_turn)
    assert not bench.wrong and not bench.unmeasured
    gates = {(line.case, line.peer_name): line.gate for line in bench.lines}
    assert gates == {
        ("swiglu glu, 1x8x32, fp32", "cpu"): 8.0,
        ("richards_glu, 1x8x32", "eager"): 2.0,
        ("richards_glu, 1x8x32, its products", "products alone"): 0.85,
        ("richards_glu, 1x8x32, less kept, its products", "products alone"): None,
        ("poly attention, 1x32, heads of 16", "eager"): 5.0,
        ("poly attention, 1x32, heads of 16, beside softmax", "sdpa-cudnn"): 0.5,
        ("masked diffusion, tiny, 2x8", "next token"): 0.9,
    }


@pytest.mark.usefixtures("on_definitions")
def test_another_function_on_the_cpu_is_not_timed(bench, monkeypatch):
    monkeypatch.setitem(block_parts.PLAIN_MLPS, "swiglu", lambda m, x: 1.01 * block_parts.swiglu(m, x))
    beside_cpu(bench, "swiglu glu", Layer("mlp", ("swiglu",), TINY, "cpu", torch.float32), "glu")
    assert not bench.lines and bench.wrong[0].startswith("swiglu glu, 1x8x32, fp32: ours and the CPU's differ by 9.9e-03 ")


@pytest.mark.slow
@pytest.mark.interpreted
def test_a_dry_run(capfd):
    assert guarded("bench", bench_blocks.main, ["--dry", "--only", "swiglu", "--parts", "large"]) == 0
    assert capfd.readouterr().out.endswith("blocks: 3 lines, nothing kept (dry); 0 of 0 gates hold\n")
