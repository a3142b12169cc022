"""What is drawn, and how often: noise bit for bit, thresholds against Hugging Face's, frequencies by chi-square."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers.generation import logits_process as hf

from gpubound.kernels.sampling import Settings
from gpubound.kernels.triton import sampling as fast
from gpubound.kernels.triton.sampling import _finish, _keep, _noise

from .cases import definitions, draw
from .test_sampling import BY, INF, marks, outputs, rows_of, settings_of, small_tiles

reference = definitions("sampling")

# Random123's known answers for Philox 4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_philox_gives_the_known_answers(counter, key, result):
    even, odd, keys = (torch.tensor(words)[:, None, None] for words in (counter[::2], counter[1::2], key))
    assert torch.stack(reference._philox(even, odd, keys), 1).flatten().tolist() == list(result)


@triton.jit
def noise_kernel(out_ptr, seed_ptr, position_ptr, row_ptr, QUADS: tl.constexpr, STREAM: tl.constexpr):
    b = tl.program_id(0)
    quad = tl.arange(0, QUADS)
    bits = _noise(tl.load(seed_ptr + b), tl.load(position_ptr + b), tl.load(row_ptr + b), quad, STREAM)
    at = out_ptr + b * QUADS * 4 + 4 * quad[:, None] + tl.arange(0, 4)[None]
    tl.store(at, bits.to(tl.int64))


@pytest.mark.parametrize("stream", [0, 1], ids=["tokens", "chunks"])
def test_the_noise_is_the_same_in_both_mirrors(stream, device):
    settings = settings_of(5, device, seed=[0, -1, 5, 1 << 40, -(1 << 63)], row=[0, 1, 2, 2**31 - 1, 7])
    position, got = rows_of(5, device, position=[0, 3, 2**31 - 2, 5, 6]).position, torch.zeros(5, 64, dtype=torch.int64)
    got = got.to(device)
    noise_kernel[(5,)](got, settings.seed, position, settings.row, 16, stream)
    assert got.equal(reference._noise(settings.seed, position, settings.row, 64, stream))
    assert reference._noise(settings.seed, position, settings.row, 61, stream).equal(got[:, :61])


@triton.jit
def finish_kernel(out_ptr, bits_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, _finish(tl.load(bits_ptr + i).to(tl.uint32), tl.zeros([N], tl.float32)))


def test_times_have_their_digits_at_both_ends(device):
    """-log(1 - u) by the kernel's fp32 against fp64, from the smallest u over the change of formula to the largest."""
    bits = torch.tensor([0, 1, 77, 2**20, 2**27 - 1, 2**27, 2**27 + 1, 2**31, 2**32 - 2**20, 2**32 - 2, 2**32 - 1] + [9] * 5)
    got = torch.zeros(16, device=device)
    finish_kernel[(1,)](got, bits.to(device), 16)
    want = torch.log1p(-(bits.double() + 0.5) / 2**32)
    assert (got.double().cpu() / want - 1).abs().max() < 1e-6


@BY
def test_the_same_token_in_any_slot_batch_and_tile(by, device, monkeypatch):
    logits = draw(device, torch.float32, 4, 300)
    options = {"top_p": [1.0, 0.9, 1.0, 0.7], "seed": [3, 3, -5, 1 << 40], "row": [0, 1, 0, 6]}
    drawn = []
    for order, tile in (([0, 1, 2, 3], 128), ([3, 1, 0, 2], 64), ([2], 512)):
        small_tiles(monkeypatch, tile)
        picked = {name: [values[i] for i in order] for name, values in options.items()}
        rows, out = rows_of(len(order), device, position=[3 + i for i in order]), outputs(len(order), device)
        by.sample(logits[order], rows, settings_of(len(order), device, **picked), out)
        drawn.append(dict(zip(order, out.emitted.tolist())))
    assert drawn[0] == drawn[1] and drawn[2] == {2: drawn[0][2]}


@BY
def test_seed_row_and_position_each_matter(by, device):
    logits = torch.zeros(1, 300, device=device).expand(4, 300).contiguous()
    settings, drawn = settings_of(4, device, seed=[1, 2, 1, 1], row=[0, 0, 1, 0]), []
    for _ in range(2):
        out = outputs(4, device)
        by.sample(logits, rows_of(4, device, position=[3, 3, 3, 4]), settings, out)
        drawn.append(out.emitted.tolist())
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 4


# The thresholds.

# k times p is never a whole number: where all are equal, the last bit of a sum would decide.
THRESHOLDS = [
    {"top_k": 1}, {"top_k": 3}, {"top_k": 50}, {"top_k": 299}, {"top_k": 400}, {"top_p": 0.0}, {"top_p": 0.01}, {"top_p": 0.5},
    {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.02}, {"min_p": 0.7}, {"top_k": 23, "top_p": 0.8},
    {"top_k": 23, "top_p": 0.8, "min_p": 0.1}, {"top_p": 0.95, "min_p": 0.05}, {"top_k": 98, "top_p": 0.99, "min_p": 0.001}, {},
]  # fmt: skip


def threshold_settings(device, thresholds=THRESHOLDS, **given) -> Settings:
    """A row for each of them."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return settings_of(len(thresholds), device, **{n: [t.get(n, off[n]) for t in thresholds] for n in off}, **given)


def hf_chain(logits: Tensor, ids: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float) -> Tensor:
    """Logits after Hugging Face's processors, in the order of its `generate`."""
    chain = [hf.RepetitionPenaltyLogitsProcessor(penalty), hf.TemperatureLogitsWarper(temperature)]
    chain += [hf.TopKLogitsWarper(top_k)] if top_k else []
    chain += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [hf.MinPLogitsWarper(min_p)] if min_p else []
    for processor in chain:
        logits = processor(ids, logits)
    return logits


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("penalty", [1.0, 1.4, 0.6])
def test_reference_keeps_what_hugging_face_keeps(temperature, penalty):
    count = len(THRESHOLDS)
    logits, seen = 3 * draw("cpu", torch.float32, count, 300), marks(count, 300, "cpu")
    settings = threshold_settings("cpu", temperature=temperature, penalty=penalty)._replace(seen=seen)
    scaled, _ = reference._scaled(logits, settings)
    got = scaled >= reference._floor(scaled, settings)[:, None]
    for b in range(count):
        options = [settings.top_k[b].item(), settings.top_p[b].item(), settings.min_p[b].item()]
        left = hf_chain(logits[b : b + 1], seen[b].nonzero().T, temperature, *options, penalty)[0]
        assert got[b].equal(left.isfinite()), THRESHOLDS[b]
        chances = torch.where(got[b], scaled[b], -INF).softmax(0)
        assert torch.allclose(chances, left.softmax(0), rtol=1e-4, atol=1e-7), THRESHOLDS[b]


@triton.jit
def keep_kernel(logits_ptr, floor_ptr, depth_ptr, inverse_ptr, top_k_ptr, top_p_ptr, min_p_ptr, values_ptr, quads_ptr, V,
                BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    logits_ptr += b * V
    leads = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        leads = tl.maximum(leads, tl.load(logits_ptr + i, mask=i < V, other=float("-inf")))
    room = tl.cdiv(V, BLOCK) * BLOCK
    _, depth, floor = _keep(values_ptr + b * room, quads_ptr + b * room // 4, logits_ptr, None, 1.0, tl.max(leads),
                            tl.load(inverse_ptr + b), V, leads, tl.load(top_k_ptr + b), tl.load(top_p_ptr + b),
                            tl.load(min_p_ptr + b), BLOCK)  # fmt: skip
    tl.store(floor_ptr + b, floor)
    tl.store(depth_ptr + b, depth)


SHAPES = {
    "peaked": (4.0, None, 1.0),
    "flat": (0.01, None, 1.0),
    "ties": (2.0, 1.0, 1.0),
    "close": (1e-7, None, 1.0),
    "all the same": (0.0, None, 1.0),
    "cold": (4.0, None, 0.05),
    "hot": (4.0, None, 50.0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_search_finds_the_threshold(shape, device):
    """The kernel keeps exactly the reference's tokens; 300 words in tiles of 128, some of them masked.

    A row takes the interpreter 0.2 s: two shapes have every threshold, the others a third of them by turns.
    """
    scale, step, temperature = SHAPES[shape]
    turn = list(SHAPES).index(shape)
    thresholds = THRESHOLDS if turn < 2 else THRESHOLDS[turn % 3 :: 3]
    count = len(thresholds)
    logits = scale * draw(device, torch.float32, count, 300)
    if step is not None:
        logits = logits.div(step).round() * step
    logits[:, 5::7] = -INF
    settings = threshold_settings(device, thresholds, temperature=temperature)
    scaled, _ = reference._scaled(logits, settings)
    floor, depth = torch.zeros(count, device=device), torch.zeros(count, device=device, dtype=torch.int32)
    values, quads = torch.empty(count, 384, device=device), torch.zeros(count, 96, device=device, dtype=torch.int32)
    inverse = settings.temperature.reciprocal()
    keep_kernel[(count,)](
        logits, floor, depth, inverse, settings.top_k, settings.top_p, settings.min_p, values, quads, 300, 128
    )  # fmt: skip
    want = (scaled >= reference._floor(scaled, settings)[:, None]) & (scaled >= -27)
    got = scaled >= floor[:, None]
    different = (got != want).any(1).tolist()
    assert not any(different), [thresholds[b] for b in range(count) if different[b]]
    assert depth.min() >= 1 and depth.max() <= 3


# The frequencies.


def chances(logits: Tensor, **options) -> Tensor:
    """The exact distribution, by Hugging Face's processors."""
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0} | options
    return hf_chain(logits[None], torch.tensor([[1, 4]]), **options)[0].double().softmax(0)


def p_value(drawn: Tensor, exact: Tensor) -> float:
    """Of the chi-square statistic; 0 if a token was drawn that cannot be."""
    counts = torch.bincount(drawn.long().cpu(), minlength=len(exact)).double()
    if counts[exact == 0].any():
        return 0.0
    wanted = exact[exact > 0] * len(drawn)
    statistic = ((counts[exact > 0] - wanted).square() / wanted).sum()
    return torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic / 2).item()


def drawn_by(by, logits: Tensor, draws: int, device, vary: str, **options) -> Tensor:
    """One token for each of `draws` rows, which differ by their seed, number or position alone."""
    seen = torch.zeros(draws, len(logits), device=device, dtype=torch.uint8)
    seen[:, [1, 4]] = 1
    rows = rows_of(draws, device, **({"position": list(range(draws))} if vary == "position" else {"position": [3] * draws}))
    rows.limit.fill_(draws + 100)
    numbers = {"seed": 3, "row": [2] * draws} | ({vary: list(range(draws))} if vary != "position" else {}) | options
    out = outputs(draws, device)
    by.sample(logits.to(device).repeat(draws, 1), rows, settings_of(draws, device, seen, **numbers), out)
    return out.emitted


FREQUENCIES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "penalty": {"penalty": 1.8},
    "all": {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "penalty": 1.2},
}


@pytest.mark.parametrize("vary", ["seed", "row", "position"])
@pytest.mark.parametrize("name", FREQUENCIES)
def test_frequencies_of_the_reference(name, vary, monkeypatch):
    small_tiles(monkeypatch, 16, 4)
    logits = 1.2 * draw("cpu", torch.float32, 12)
    exact = chances(logits, **FREQUENCIES[name])
    assert p_value(drawn_by(reference, logits, 8_000, "cpu", vary, **FREQUENCIES[name]), exact) > 1e-3


@pytest.mark.parametrize("name", ["plain", "min-p", "all"])
def test_frequencies_of_the_kernel(name, device, monkeypatch):
    """Few draws where each takes the interpreter 20 to 100 ms; beside the reference's, they are the very same tokens."""
    small_tiles(monkeypatch, 16, 4)
    draws = 200_000 if device.type == "cuda" else {"plain": 60, "min-p": 40, "all": 20}[name]
    logits = 1.2 * draw("cpu", torch.float32, 12)
    drawn = drawn_by(fast, logits, draws, device, "position", **FREQUENCIES[name])
    assert p_value(drawn, chances(logits, **FREQUENCIES[name])) > 1e-3
    wanted = drawn_by(reference, logits, draws, device, "position", **FREQUENCIES[name])
    assert (drawn != wanted).sum().item() <= draws // 50_000  # two times that agree in six digits: once in a million draws


def test_a_wrong_distribution_is_seen():
    logits = 1.2 * draw("cpu", torch.float32, 12)
    drawn = drawn_by(reference, logits, 8_000, "cpu", "row", temperature=1.2)
    assert p_value(drawn, chances(logits)) < 1e-6 and p_value(drawn, chances(logits, top_k=11)) == 0.0
