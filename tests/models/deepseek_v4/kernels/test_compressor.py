"""Windows to entries: token by token they are transformers' own, kernels agree with the definition, nothing else is written."""

import pytest
import torch

from gpubound.kernels.decode_product import Norm
from gpubound.kernels.registry import OPS, load
from gpubound.models.deepseek_v4 import kernels
from gpubound.models.deepseek_v4.kernels.attention import Pending, Windows
from gpubound.models.deepseek_v4.kernels.triton import attention as fast
from tests.kernels.cases import TOLERANCE, assert_inside, banded, draw, same

from .theirs import angles, config, filled, theirs

FP32 = torch.float32
BOTH = ("triton", "reference")


def state(rows: int, slots: int, width: int, entries: int, channels: int, device, dtype=FP32) -> tuple[Pending, torch.Tensor]:
    """As a decoder finds it: anything may lie there. NaN shows what is read before it was written."""
    products = (torch.full((rows, slots, width), float("nan"), device=device, dtype=dtype) for _ in range(2))
    return Pending(*products), torch.full((rows, entries, channels), float("nan"), device=device, dtype=dtype)


@pytest.mark.parametrize("spare", [0, 3], ids=["tight", "room"])
@pytest.mark.parametrize("kind", ["HCA", "CSA"])
@pytest.mark.parametrize("source", BOTH)
def test_pieces_of_any_length_give_transformers_entries(source, kind, spare, device):
    """A prompt, then tokens one by one and a few at a time, beside the module's own pass over the whole."""
    c = config(index_n_heads=2, index_head_dim=16, q_lora_rank=8, index_topk=3)
    module = filled(getattr(theirs(), f"DeepseekV4{kind}Compressor")(c))
    m, D, tokens = module.compress_rate, 16, 17
    x = draw(torch.device("cpu"), FP32, 2, tokens, 24)
    with torch.no_grad():
        want = module(x, draw(torch.device("cpu"), FP32, 2, tokens, 8), torch.arange(tokens)[None].expand(2, -1), None, 0)[0][
            :, 0
        ]
        products = [p(x).to(device) for p in (module.kv_proj, module.gate_proj)]
    series = products[0].shape[-1] // D
    pending, store = state(2, series * m + spare, series * D, tokens // m, D, device)
    cos, sin = (t.to(device) for t in angles(module.rotary_emb, tokens))
    norm = Norm(module.kv_norm.weight.detach().to(device), 0.1)
    begin = 0
    for count in (7, 1, 1, 1, 4, 1, 2):
        new = (p[:, begin : begin + count].contiguous() for p in products)
        position = torch.full((2,), begin, device=device, dtype=torch.int32)
        part = Windows(*new, pending, store, module.position_bias.detach().to(device), norm)
        load(source, "compress")([part], position, cos, sin)
        begin += count
    assert begin == tokens and want.shape == store.shape
    same("entries", store, want, 1e-5)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("series", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches(series, dtype, count, device):
    """Rows that stand differently: one fills a window with its first token, one has none before, one waits. In one launch,
    parts of another width and with other pending tokens."""
    results = []
    for source in BOTH:
        parts, *rest = OPS["compress"].example(torch.Generator().manual_seed(0), series, count)
        moved = [
            Windows(
                part.kv.to(device),
                part.gate.to(device),
                Pending(*(t.detach().to(device, dtype) for t in part.pending)),
                part.store.detach().to(device, dtype),
                part.bias.to(device),
                Norm(part.norm.weight.to(device), part.norm.eps),
            )
            for part in parts
        ]
        results.append(load(source, "compress")(moved, *(t.to(device) for t in rest)))
    assert len(results[0]) == 3 * count
    for name, got, want in zip(("store", "kv", "gate") * count, *results):
        same(name, got, want, max(TOLERANCE[dtype], 1e-5))


def test_what_is_beyond_the_store_is_not_written(device):
    """Four windows close, two have a place: stores and what waits stay inside their tensors."""
    x = draw(device, FP32, 1, 8, 4)
    for source in BOTH:
        (whole, store), *waiting = (banded(shape, device) for shape in ((1, 2, 4), (1, 3, 4), (1, 3, 4)))
        pending = Pending(*(inside for _, inside in waiting))
        position = torch.zeros(1, device=device, dtype=torch.int32)
        cos = torch.ones(3, 1, device=device)
        norm = Norm(torch.ones(4, device=device), 1e-6)
        part = Windows(x, x, pending, store, torch.zeros(2, 4, device=device), norm)
        load(source, "compress")([part], position, cos, cos - 1)
        for outer, inner in ((whole, store), *waiting):
            assert_inside(outer, inner)
        # Tokens 5, 6, 7 at their places mod 3.
        assert pending.kv[0].equal(x[0, [6, 7, 5]])


def test_a_call_that_could_overwrite_what_it_reads_is_two_launches(device, monkeypatch):
    calls = []

    class Counting:
        def __getitem__(self, grid):
            return lambda *arguments, **options: calls.append(arguments[-2:])

    monkeypatch.setattr(fast, "_compress_kernel", Counting())
    for slots, tokens, want in ((4, 1, [(True, True)]), (4, 2, [(True, False), (False, True)]), (5, 2, [(True, True)])):
        pending, store = state(1, slots, 8, 3, 4, device)
        x, cos = torch.zeros(1, tokens, 8, device=device), torch.ones(5, 1, device=device)
        norm, calls[:] = Norm(torch.ones(4, device=device), 1e-6), []
        part = Windows(x, x, pending, store, torch.zeros(2, 8, device=device), norm)
        fast.compress([part], torch.zeros(1, device=device).int(), cos, cos)
        assert calls == want


WRONG = {
    "an entry of the store, 4, or hold two series, 8, got 5": {"kv": torch.ones(1, 1, 5), "gate": torch.ones(1, 1, 5)},
    "a slot for each of the 4 tokens of an entry, got 3": {"pending": Pending(torch.ones(1, 3, 8), torch.ones(1, 3, 8))},
    r"each position up to 4 and at most 2 pairs, got \(4, 1\) and \(5, 1\)": {"cos": torch.ones(4, 1)},
    r"position must be a contiguous torch.int32 \(1,\)": {"position": torch.zeros(2, dtype=torch.int32)},
}


@pytest.mark.parametrize("named", WRONG)
def test_wrong_arguments(named):
    x, pending, other = torch.ones(1, 1, 8), Pending(torch.ones(1, 4, 8), torch.ones(1, 4, 8)), WRONG[named]
    part = Windows(x, x, pending, torch.ones(1, 3, 4), torch.ones(2, 8), Norm(torch.ones(4), 1e-6))
    right = {
        "parts": [part._replace(**{key: t for key, t in other.items() if key in Windows._fields})],
        "position": torch.zeros(1, dtype=torch.int32),
        "cos": torch.ones(5, 1),
        "sin": torch.ones(5, 1),
    }
    with pytest.raises(ValueError, match=f"^compress: .*{named}"):
        kernels.compress(**right | {key: value for key, value in other.items() if key in right})


def test_parts_of_one_launch_are_of_the_same_tokens():
    def part(tokens: int, window: int) -> Windows:
        x, pending = torch.ones(1, tokens, 8), Pending(torch.ones(1, 8, 8), torch.ones(1, 8, 8))
        return Windows(x, x, pending, torch.ones(1, 3, 4), torch.ones(window, 8), Norm(torch.ones(4), 1e-6))

    given = torch.zeros(1, dtype=torch.int32), torch.ones(9, 1), torch.ones(9, 1)
    for other, named in (
        ([part(2, 2)], r"got \(1, 1, 2\) and \(1, 2, 2\)"),
        ([part(1, 4)], r"got \(1, 1, 2\) and \(1, 1, 4\)"),
        ([part(1, 2)] * 2, "got 3 parts, wanted 1 to 2"),
    ):
        with pytest.raises(ValueError, match=named):
            kernels.compress([part(1, 2), *other], *given)
