"""Steps whose rows are multiplied together by kernels of our own (kernels/quantized_product.py), under the interpreter."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import transformer as ways
from gpubound.decode.placement.plan import LayerStage
from gpubound.decode.runner import RunnerConfig
from gpubound.decode.transformer import FusedRunner
from gpubound.decode.weight_view import bind
from gpubound.kernels import plans
from gpubound.kernels.plans import RULES
from gpubound.kernels.plans.types import SplitPlan

from . import cases


@pytest.fixture(autouse=True)
def interpreted(interpret):
    interpret()


def body_of(model, rows: int, **build) -> FusedRunner:
    return FusedRunner(bind(model, 32), RunnerConfig(rows, 32, **build))


def logits(body: FusedRunner, rows: int, first: int = 3) -> torch.Tensor:
    """Of two steps, of rows that begin with different tokens."""
    token, found = torch.arange(first, first + rows), []
    for place in range(2):
        body.begin(token)
        found.append(body.step(token, torch.full((rows,), place, dtype=torch.int32)).clone())
        token = (token * 5 + 1) % body.vocab
    return torch.cat(found)


@pytest.fixture
def several_parts(monkeypatch):
    """Make products of these small models' weights share their sums, as large ones do."""
    rule = RULES["split_product"]
    parts = rule._replace(plan=lambda job: SplitPlan(16, 16, 4, 1 if job.way else 2, 2))
    monkeypatch.setitem(RULES, "split_product", parts)
    monkeypatch.setattr(plans, "_settled", {})


@pytest.mark.parametrize("kind, layers", [("Qwen3", 1), pytest.param("Qwen2", 2, marks=pytest.mark.slow)])
def test_products_in_parts_give_the_logits_of_those_by_torch(kind, layers, several_parts, monkeypatch):
    """A norm of q and k; biases. Attention adds q, k and v, norms the stream, and all that is not written is NaN."""
    model, found = cases.build(kind, torch.bfloat16, num_hidden_layers=layers), []
    for sizes, split in ((ways.SPLIT, range(9, 129)), ((), range(0))):
        monkeypatch.setattr(ways, "SPLIT", sizes)
        body = body_of(model, 18)
        assert body.split == split
        if body.workspace.parts is not None:
            body.workspace.parts.fill_(float("nan"))
        found.append(logits(body, 18))
        assert body.workspace.pending is None  # the last norm has added the last parts
    assert (found[0] - found[1]).norm() / found[1].norm() < 2e-2
    kept = body_of(model, 18)
    monkeypatch.setattr(ways, "SPLIT", ((1 << 40, range(9, 129)),))
    kept.rebind()
    assert kept.split == range(9, 129)
    monkeypatch.setattr(ways, "TILED", ())
    kept.rebind()
    assert (kept.gemv_rows, kept.tiled_rows, kept.split) == (ways.FEW, 0, range(9, 129))
    kept.keep_hidden_states(None)  # a draft reads the stream between the layers
    assert not kept.split and not kept.workspace.split


def test_layers_on_several_devices_have_no_split_products():
    """The next device's first norm would have to add what this one's last product leaves."""
    live = bind(cases.build("Llama", torch.bfloat16, num_hidden_layers=2), 32)
    stages = [LayerStage(torch.device("cpu"), range(at, at + 1)) for at in range(2)]
    body = FusedRunner(live, RunnerConfig(18, 32), stages)
    assert body.tiled_rows == 16 and not body.split


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2", "Qwen2"])
def test_rows_taken_together_give_the_logits_of_rows_one_by_one(kind, monkeypatch):
    """A norm of q and k; norms behind the parts, and so no copy of the stream; biases."""
    model = cases.build(kind, torch.bfloat16, num_hidden_layers=2)
    body = body_of(model, 4)
    most = 16 if kind == "Gemma2" else 8  # then split products, which take no norms behind the parts
    assert (body.gemv_rows, body.tiled_rows) == (1, most)
    assert (body.workspace.copy is None) == (kind == "Gemma2")
    if body.workspace.copy is not None:
        body.workspace.copy.fill_(float("nan"))  # nobody reads it before it is written
    together = logits(body, 4)
    monkeypatch.setattr(ways, "TILED", ())
    other = body_of(model, 4)
    assert (other.gemv_rows, other.tiled_rows) == (ways.FEW, 0)
    for row in range(4):
        alone = logits(other, 1, first=3 + row)
        assert (together[row::4] - alone).norm() / alone.norm() < 2e-2


@pytest.mark.slow
def test_the_tokens_of_a_speculative_step_are_taken_together_where_that_is_asked_for():
    model = cases.build("Qwen3", torch.bfloat16, num_hidden_layers=1)
    body = body_of(model, 1, tokens=4, same_bits=False)
    assert (body.gemv_rows, body.tiled_rows, body.same_kernels(3)) == (1, 16, False)
    tokens, places = torch.tensor([[5, 7, 2, 9]], dtype=torch.int32), torch.arange(4, dtype=torch.int32)[None]
    found = []
    for parts in ([slice(None)], range(4)):
        body.cache.poison()
        logits = []
        for part in parts:
            body.begin(tokens[:, part].flatten())
            logits.append(body.step(tokens[:, part].contiguous(), places[:, part].contiguous()).clone())
        found.append(torch.cat(logits))
    together, alone = found
    assert alone.isfinite().all() and (together - alone).norm() / alone.norm() < 2e-2


@pytest.mark.parametrize(
    ("dtype", "build"),
    [
        (torch.float16, {}),  # x times a gain may have no end
        (torch.float32, {}),
        (torch.bfloat16, {"tokens": 3}),  # speculating rows get the bits of plain steps
        (torch.bfloat16, {"weights": "int8"}),
    ],
)
def test_what_is_never_taken_together(dtype, build):
    body = body_of(cases.build("Llama", dtype, num_hidden_layers=1), 4, **build)
    assert (
        body.tiled_rows == 0
        and body.gemv_rows == (4 if "weights" in build else 8 if build else 2)
        and body.workspace.gemv_rows is None
    )


def test_layers_that_fill_the_gpu_and_adapters_are_not_taken_together(monkeypatch):
    model = cases.build("Llama", torch.bfloat16, num_hidden_layers=1)
    monkeypatch.setattr(ways, "SPLIT", ())
    gate, both = ways.TILED, 2 * 32 * 40 * 2  # bytes of gate and up
    for sizes, most in (
        (gate, 16),
        (((both, 16), (2 * both, 4)), 16),
        (((both - 1, 16), (both, 4)), 4),
        (((1, 16), (2, 4)), 0),
    ):
        monkeypatch.setattr(ways, "TILED", sizes)
        assert body_of(model, 4).tiled_rows == most
    monkeypatch.setattr(ways, "TILED", gate)
    body = body_of(model, 4)
    assert body.tiled_rows == 16
    gb.lora.add(model, rank=4)
    body.rebind()
    assert (body.tiled_rows, body.gemv_rows, body.workspace.gemv_rows) == (0, ways.FEW, None)


def test_the_table_and_the_certificate_know_each_way(monkeypatch):
    model = cases.build("Llama", torch.bfloat16, num_hidden_layers=1)
    monkeypatch.setattr(ways, "SPLIT", ((32 << 20, range(9, 25)),))
    for rows, known in ((1, {1}), (4, {1, 4}), (16, {1, 8, 16}), (40, {1, 8, 24, 40})):
        body = body_of(model, rows)
        assert body.row_counts() == known
        table = {what: how for what, how, _ in body.report()}
        assert table.get(f"2 to {min(rows, 8)} rows", "").startswith("triton: tiled products") == (rows > 1)
        assert table.get(f"9 to {min(rows, 24)} rows", "").startswith("triton: split products") == (rows > 8)
        assert ("more than 24 rows" in table) == (rows > 24)
