"""Attention within the examples of packed rows: each example's result and gradients are those that it has alone."""

import pytest
import torch

from gpubound import trace
from gpubound.layers.attention import Attention, attend
from gpubound.layers.block import to_device
from gpubound.layers.packed_attention import Segments

from ..models.packed import examples, packed, spans

LENGTHS = [[5, 1, 7], [13], [2, 3]]
WIDTH = 13


def rows():
    return [examples(lengths, 50) for lengths in LENGTHS]


def heads(device="cpu", dtype=torch.float32, H=4, K=2, D=8, width=WIDTH, size=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((size, width, H, D), (size, width, K, D), (size, width, K, D))
    made = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes)
    return list(made)


@pytest.mark.parametrize("fields", [("segment_ids", "cu_seqlens"), ("segment_ids",), ("cu_seqlens",)], ids="+".join)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("window", [None, 3])
def test_each_example_as_alone(fields, causal, window):
    batch = packed(rows(), WIDTH)
    segments = Segments.of(batch["input_ids"], *(batch[f] if f in fields else None for f in ("segment_ids", "cu_seqlens")))
    qkv = heads()
    got = attend(*(t.transpose(1, 2) for t in qkv), segments, 0.3, causal=causal, window=window)
    alone = torch.zeros_like(got)
    for row, span in spans(rows()):
        q, k, v = (t[row : row + 1, span].transpose(1, 2) for t in qkv)
        at = torch.arange(q.shape[2])
        distance = at[:, None] - at
        seen = torch.ones_like(distance, dtype=torch.bool) if not causal else distance >= 0
        if window is not None:
            seen = seen & (distance.abs() < window)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = (q @ k.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
        alone[row, span] = (scores.softmax(-1) @ v).transpose(1, 2)[0]
    real = batch["segment_ids"] >= 0
    torch.testing.assert_close(got[real], alone[real], rtol=1e-5, atol=1e-6)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(2)) * real[..., None, None]
    wanted = torch.autograd.grad((alone * weights).sum(), qkv)
    for gradient, want in zip(torch.autograd.grad((got * weights).sum(), qkv), wanted):
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)
        assert not gradient[~real].any()  # and none is nan
    assert got.isfinite().all()


def test_bounds_for_the_kernel_stay_within_rows_whatever_the_batch_holds():
    """A certificate shuffles the integers of a batch, and a kernel would follow them out of its tensors."""
    batch = packed(rows(), WIDTH)
    segments = Segments.of(batch["input_ids"], batch["segment_ids"], batch["cu_seqlens"])
    bounds = segments.bounds()
    assert set(bounds.tolist()) == set(batch["cu_seqlens"].tolist()) and (bounds.diff() >= 0).all()
    for shuffled in (batch["cu_seqlens"].flip(0), torch.tensor([7, -3, 1000, 2], dtype=torch.int32)):
        bounds = Segments.of(batch["input_ids"], batch["segment_ids"], shuffled).bounds()
        assert bounds[0] == 0 and bounds[-1] == 3 * WIDTH and (bounds.diff() >= 0).all()
        assert {0, WIDTH, 2 * WIDTH} <= set(bounds.tolist()) and bounds.dtype == torch.int32


def test_a_layer_reads_them_as_its_mask():
    torch.manual_seed(0)
    layer, batch = Attention(16, 4, 2), packed(rows(), WIDTH)
    x = torch.randn(3, WIDTH, 16)
    segments = Segments.of(batch["input_ids"], batch["segment_ids"], batch["cu_seqlens"])
    got = layer(x, None, segments)
    for row, span in spans(rows()):
        torch.testing.assert_close(got[row, span], layer(x[row : row + 1, span], None)[0], rtol=1e-5, atol=1e-6)


def test_wrong_fields():
    batch = packed(rows(), WIDTH)
    ids, numbers, bounds = (batch[name] for name in ("input_ids", "segment_ids", "cu_seqlens"))
    assert Segments.of(ids, None, None) is None
    with pytest.raises(ValueError, match=r"cu_seqlens: got torch.int64 of shape \(13,\)"):
        Segments.of(ids, numbers, bounds.long())
    with pytest.raises(ValueError, match=r"segment_ids: got shape \(2, 13\), wanted that of input_ids, \(3, 13\)"):
        Segments.of(ids, numbers[:2], bounds)


def test_they_move_with_a_batch():
    batch = packed(rows(), WIDTH)
    segments = Segments(batch["segment_ids"], batch["cu_seqlens"])
    assert to_device(segments, torch.device("cpu")) is segments
    moved = to_device((segments,), torch.device("meta"))[0]
    assert (moved.segment_ids.device.type, moved.cu_seqlens.device.type) == ("meta", "meta")


# On a GPU: torch's variable-length kernel against the definition.

CASES = [(64, 4, 4, None), (64, 8, 2, None), (128, 8, 2, None), (64, 8, 2, 40), (128, 4, 1, 17), (256, 2, 1, None)]


def gpu_batch(seed=0):
    lengths = [[200, 1, 55], [256], [3, 100, 90]] if not seed else [[9, 9, 9], [120, 130], [256]]
    return packed([examples(one, 50) for one in lengths], 256, pieces=6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("D", "H", "K", "window"), CASES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_flash_against_the_definition(dtype, D, H, K, window, causal):
    batch = {name: value.cuda() for name, value in gpu_batch().items()}
    qkv = heads("cuda", dtype, H, K, D, 256)
    exact = [t.detach().double().requires_grad_() for t in qkv]
    segments = Segments(batch["segment_ids"], batch["cu_seqlens"])
    with trace.strict():
        got = attend(*(t.transpose(1, 2) for t in qkv), segments, D**-0.5, causal=causal, window=window)
    want = attend(*(t.transpose(1, 2) for t in exact), segments.mask(window, causal), D**-0.5)
    weights = torch.randn(got.shape, device="cuda", dtype=dtype)
    gradients = torch.autograd.grad((got * weights).sum(), qkv)
    wanted = torch.autograd.grad((want * weights).sum(), exact)
    limit = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for ours, theirs in zip((got, *gradients), (want, *wanted)):
        assert ours.isfinite().all()
        assert (ours.double() - theirs).norm() <= limit * theirs.norm()


@pytest.mark.gpu
def test_flash_in_a_graph_reads_the_bounds_at_each_replay():
    qkv = [t.detach() for t in heads("cuda", torch.bfloat16, 8, 2, 64, 256)]
    first, second = ({name: value.cuda() for name, value in gpu_batch(seed).items()} for seed in (0, 1))
    numbers, bounds = first["segment_ids"].clone(), first["cu_seqlens"].clone()

    def run(numbers, bounds):
        return attend(*(t.transpose(1, 2) for t in qkv), Segments(numbers, bounds), 0.125)

    run(numbers, bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(numbers, bounds)
    for batch in (second, first):
        numbers.copy_(batch["segment_ids"])
        bounds.copy_(batch["cu_seqlens"])
        graph.replay()
        assert torch.equal(result, run(batch["segment_ids"], batch["cu_seqlens"]))


@pytest.mark.gpu
def test_what_flash_cannot_do_is_a_counted_fallback():
    batch = {name: value.cuda() for name, value in gpu_batch().items()}
    segments = Segments(batch["segment_ids"], batch["cu_seqlens"])
    for dtype, D, dropout in ((torch.float32, 64, 0.0), (torch.bfloat16, 64, 0.1), (torch.bfloat16, 12, 0.0)):
        q, k, v = (t.transpose(1, 2) for t in heads("cuda", dtype, 4, 2, D, 256))
        before = sum(n for (what, _), n in trace.fallbacks.items() if "packed rows" in what)
        assert attend(q, k, v, segments, 0.125, dropout).isfinite().all()
        assert sum(n for (what, _), n in trace.fallbacks.items() if "packed rows" in what) == before + 1
