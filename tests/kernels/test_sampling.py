"""Picking and sampling: both mirrors agree on all that they change, the life of a row, exact errors.

What is drawn, and how often, is in test_sampling_distribution.py.
"""

import pytest
import torch
from torch import Tensor

from gpubound import kernels
from gpubound.kernels.sampling import Into, Rows, Settings
from gpubound.kernels.triton import sampling as fast
from tests.messages import refusals

from .apart import apart
from .cases import agree, definitions, draw, module, same

reference = definitions("sampling")

BY = pytest.mark.parametrize("by", [fast, reference], ids=["triton", "reference"])
INT, INF, NAN = torch.int32, float("inf"), float("nan")
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0, "seed": 7}
TYPES = dict(zip(Settings._fields, [torch.float32, INT, *[torch.float32] * 3, torch.int64, INT]))


def rows_of(batch: int, device, **given) -> Rows:
    """Rows at positions 3, 4, ... that may hold 100 tokens and stop at none; `given` holds lists of values."""
    values = {"token": [1] * batch, "position": range(3, 3 + batch), "alive": [1] * batch, "limit": [100] * batch}
    values |= {"bad": [0] * batch, "stops": [-1, -1, -1]} | given
    return Rows(*(torch.tensor(values[name], device=device, dtype=INT) for name in Rows._fields))


def settings_of(batch: int, device, seen: Tensor | None = None, **given) -> Settings:
    """One value for all rows, or a list of them; row numbers 0, 1, ..."""
    values = PLAIN | {"row": list(range(batch))} | given
    lists = {name: value if isinstance(value, list) else [value] * batch for name, value in values.items()}
    return Settings(*(torch.tensor(lists[name], device=device, dtype=dtype) for name, dtype in TYPES.items()), seen)


def marks(batch: int, words: int, device) -> Tensor:
    """Every third token seen, from another one on in each row."""
    places = torch.arange(words, device=device) + torch.arange(batch, device=device)[:, None]
    return (places % 3 == 0).to(torch.uint8)


def outputs(batch: int, device, words: int | None = None) -> Into:
    """Buffers that hold what no step leaves there; with `words`, an embedding too, whose rows all differ."""
    emitted = torch.full((batch,), -9, device=device, dtype=INT)
    if words is None:
        return Into(emitted)
    return Into(emitted, draw(device, torch.bfloat16, words, 70, seed=9), torch.full((batch, 70), 5.0, device=device))


def small_tiles(monkeypatch, tile: int, chunk: int = 64) -> None:
    """Rows of several tiles, and of several chunks, which both mirrors draw."""
    monkeypatch.setattr(fast, "TILE", tile)
    for mirror in (fast, module("sampling")):
        monkeypatch.setattr(mirror, "CHUNK", chunk)


def partials(batch: int, parts: int, device) -> tuple[Tensor, Tensor]:
    """Maxima with many equals, and tokens that are not in order."""
    best = draw(device, torch.float32, batch, parts).mul(2).round()
    order = torch.stack([torch.randperm(parts, generator=torch.Generator().manual_seed(i)) for i in range(batch)])
    return best, order.to(device, INT)


@pytest.mark.parametrize("parts", [1, 63, 500])
def test_pick_matches(parts, device, monkeypatch):
    monkeypatch.setattr(fast, "TILE", 128)  # several tiles of partials and of the embedding
    best, arg = partials(4, parts, device)
    rows = rows_of(4, device, alive=[1, 0, 1, 1], limit=[100, 100, 100, 6], stops=[5, 2, -1])
    seen = marks(4, 500, device)
    _, _, left, (emitted, *_), _ = agree("pick", best, arg, rows, outputs(4, device, 500), seen)
    agree("pick", best, arg, rows, outputs(4, device))
    lowest = [arg[b][best[b] == best[b].max()].min().item() for b in range(4)]
    assert emitted.tolist() == [lowest[0], -1, *lowest[2:]] and left.token.tolist() == [lowest[0], 1, *lowest[2:]]


MIXED = {
    "temperature": [0.0, 0.7, 1.3, 1.0],
    "top_k": [3, 0, 40, 7],
    "top_p": [0.5, 0.8, 1.0, 0.9],
    "min_p": [0.1, 0, 0.02, 0.05],
}
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": [0.3, 0.8, 1.0, 5.0]},
    "top-k": {"top_k": [1, 5, 250, 1000]},
    "top-p": {"top_p": [0.0, 0.3, 0.9, 0.999]},
    "min-p": {"min_p": [0.001, 0.05, 0.5, 1.0]},
    "top-k and top-p": {"top_k": 30, "top_p": [0.2, 0.6, 0.9, 0.95]},
    "mixed": MIXED,
}


@pytest.mark.parametrize("penalty", [1.0, [1.0, 1.3, 0.7, 3.0]], ids=["", "penalty"])
@pytest.mark.parametrize("name", SETTINGS)
def test_sample_matches(name, penalty, device, monkeypatch, dtype=torch.float32):
    """300 words in tiles of 128: none is whole in the last. Two rows have ties and masked words, all of the first chunk."""
    small_tiles(monkeypatch, 128)
    logits = 3 * draw(device, torch.float32, 4, 300)
    logits[1:3] = logits[1:3].round()
    logits[2, ::2] = logits[2, :130] = -INF
    settings = settings_of(4, device, marks(4, 300, device), penalty=penalty, **SETTINGS[name])
    out, logprob = outputs(4, device, 300), torch.zeros(4, device=device)
    filtered = name not in ("greedy", "temperature")
    agree("sample", logits.to(dtype), rows_of(4, device), settings, out, logprob, False, filtered, limit=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["greedy", "temperature", "top-p"])
def test_logits_in_16_bits_are_what_they_are_in_32(name, dtype, device, monkeypatch):
    test_sample_matches(name, 1.0, device, monkeypatch, dtype)


@BY
def test_of_equal_logits_the_lowest_token_is_taken(by, device, monkeypatch):
    """Equal in one lane of the kernel, in two, and everywhere."""
    small_tiles(monkeypatch, 64)
    best, picked, sampled = torch.zeros(3, 200, device=device), outputs(3, device), outputs(3, device)
    best[0, [7, 71, 135]], best[1, [60, 140]] = 1.0, 1.0
    tokens = torch.arange(199, -1, -1, device=device, dtype=INT).repeat(3, 1)
    by.pick(best, tokens, rows_of(3, device), picked)
    by.sample(best, rows_of(3, device), settings_of(3, device, temperature=0.0), sampled)
    assert picked.emitted.tolist() == [64, 59, 0] and sampled.emitted.tolist() == [7, 60, 0]


@pytest.mark.parametrize("words", [1, 5, 64, 130])
@pytest.mark.parametrize("batch", [1, 2])
def test_sample_of_any_size(batch, words, device, monkeypatch):
    small_tiles(monkeypatch, 64)
    settings = settings_of(batch, device, top_p=[0.9, 1.0][:batch])
    padded = torch.full((batch, words + 3), NAN, device=device)  # rows of a wider buffer
    padded[:, :words] = draw(device, torch.float32, batch, words)
    wide = Into(torch.zeros(batch, device=device, dtype=INT))
    _, rows, *_ = agree("sample", padded[:, :words], rows_of(batch, device), settings, wide)
    assert rows.bad.tolist() == [0] * batch


@pytest.mark.parametrize("op", ["pick", "sample"])
@BY
def test_the_life_of_a_row(by, op, device):
    """Going on; stopped by a token; at its limit; dead; NaN; +inf; NaN again after an earlier one; -inf alone."""
    best = torch.zeros(8, 6, device=device)
    best[torch.arange(8), [2, 3, 4, 2, 2, 2, 2, 2]] = 1.0  # the greedy token of each row
    best[4, 1], best[5, 5], best[6, 0], best[7] = NAN, INF, NAN, -INF
    rows = rows_of(
        8, device, position=[10] * 8, limit=[13, 100, 12, 100, 100, 100, 100, 100], alive=[1, 1, 1, 0, 1, 1, 1, 1],
        bad=[0, 0, 0, 0, 0, 0, 4, 0], stops=[3, 5, -1],
    )  # fmt: skip
    seen, out = torch.zeros(8, 6, device=device, dtype=torch.uint8), outputs(8, device, 6)
    if op == "pick":
        tokens = torch.arange(6, device=device, dtype=INT).repeat(8, 1)
        by.pick(best, tokens, rows, out, seen)
    else:
        logprob = torch.zeros(8, device=device)
        by.sample(best, rows, settings_of(8, device, seen, temperature=0.0), out, logprob)
        assert logprob.isnan().tolist() == [False] * 3 + [True] * 5
        same("logprob", logprob[:3], best[:3].log_softmax(1).amax(1), 1e-6)
    assert out.emitted.tolist() == [2, 3, 4, -1, -1, -1, -1, -1]
    assert rows.token.tolist() == [2, 3, 4, 1, 1, 1, 1, 1]
    assert rows.position.tolist() == [11, 10, 10, 10, 10, 10, 10, 10]
    assert rows.alive.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert rows.bad.tolist() == [0, 0, 0, 0, 11, 11, 4, 11]
    assert seen.nonzero().tolist() == [[0, 2], [1, 3], [2, 4]]
    same("x", out.x, out.embed.float()[rows.token.long()], 0)


def test_a_row_may_fill_its_limit_and_no_more(device):
    """Five tokens held, limit 8: three more come, then the row is dead, with its last token outside the cache."""
    rows, emitted = rows_of(1, device, position=[4], limit=[8]), torch.zeros(1, device=device, dtype=INT)
    seen = []
    for _ in range(5):
        fast.pick(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device, dtype=INT), rows, Into(emitted))
        seen.append(emitted.item())
    assert seen == [1, 1, 1, -1, -1] and rows.position.tolist() == [6] and rows.alive.tolist() == [0]


def test_the_doors(device):
    """Through choice and self-test: a greedy row takes the same token by either."""
    logits, rows, out = draw(device, torch.float32, 2, 50), [rows_of(2, device) for _ in range(2)], outputs(2, device)
    kernels.sample(logits, rows[0], settings_of(2, device, temperature=0.0), out)
    kernels.pick(logits, torch.arange(50, device=device, dtype=INT).repeat(2, 1), rows[1], out)
    assert rows[0].token.tolist() == rows[1].token.tolist() == logits.argmax(1).tolist()


def test_a_cpu_draws_no_noise_for_greedy_rows(monkeypatch):
    def race(*_):
        raise RuntimeError("a race")

    monkeypatch.setattr(module("sampling"), "_race", race)
    logits, rows, out = draw("cpu", torch.float32, 2, 50), rows_of(2, "cpu"), outputs(2, "cpu")
    reference.sample(logits, rows, settings_of(2, "cpu", temperature=0.0), out)
    assert rows.token.tolist() == logits.argmax(1).tolist()
    with pytest.raises(RuntimeError, match="a race"):
        reference.sample(logits, rows, settings_of(2, "cpu", temperature=[0.0, 1.0]), out)


def compile_all() -> None:
    """Every branch of both kernels for compute capability 9.0, launched dependently and not; see aot.py."""
    import triton

    from . import aot

    triton.runtime.jit.JITFunction.run = aot.compile_instead
    for words, whole in ((50257, True), (128256, False)):
        settings = settings_of(2, "cpu", marks(2, words, "cpu") if whole else None)
        out = outputs(2, "cpu", words if whole else None)
        best, arg = torch.zeros(2, 600), torch.zeros(2, 600, dtype=INT)
        logprob = torch.zeros(2) if whole else None
        fast.sample(torch.zeros(2, words), rows_of(2, "cpu"), settings, out, logprob, whole)
        fast.pick(best, arg, rows_of(2, "cpu", stops=[]), out, settings.seen, whole)
    print(*aot.compiled)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_both_compile():
    printed = apart("from tests.kernels.test_sampling import compile_all; compile_all()")
    assert printed.split() == ["_chunks_kernel", "_sample_kernel", "_sample_kernel", "_pick_kernel"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("words", [32768, 128256, 151936])
@pytest.mark.parametrize("mixed", [False, True])
def test_large_vocabularies_on_the_gpu(words, mixed):
    device = torch.device("cuda")
    logits = 4 * draw(device, torch.float32, 32, words)
    options = {name: values * 8 for name, values in MIXED.items()} if mixed else {"temperature": [0.0, 0.7, 1.0, 1.3] * 8}
    options["penalty"] = [1.0, 1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2] * 4
    settings = settings_of(32, device, marks(32, words, device), **options)
    out = outputs(32, device, words)
    agree("sample", logits, rows_of(32, device), settings, out, torch.zeros(32, device=device), limit=2e-6)
    agree("pick", *partials(32, words // 16, device), rows_of(32, device), out)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True], ids=["", "dependent"])
def test_steps_in_a_graph_on_the_gpu(dependent):
    """Eight steps of both in one graph, replayed, are the tokens of eager steps; dependent launch changes none."""
    device = torch.device("cuda")
    logits, best, arg = draw(device, torch.float32, 4, 50257), *partials(4, 3000, device)
    settings, rings = settings_of(4, device, **MIXED), [torch.zeros(8, 4, device=device, dtype=INT) for _ in range(2)]

    def steps(rows: Rows, ring: Tensor, dependent: bool) -> None:
        for i in range(0, 8, 2):
            fast.sample(logits, rows, settings, Into(ring[i]), dependent=dependent)
            fast.pick(best, arg, rows, Into(ring[i + 1]), dependent=dependent)

    eager, captured = rows_of(4, device), rows_of(4, device)
    steps(rows_of(4, device), rings[1], dependent)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps(captured, rings[1], dependent)
    for _ in range(3):
        steps(eager, rings[0], False)
        graph.replay()
        assert rings[0].equal(rings[1]) and eager.position.equal(captured.position)


def test_errors():
    logits, rows, settings, out = torch.zeros(2, 40), rows_of(2, "cpu"), settings_of(2, "cpu"), outputs(2, "cpu", 40)
    best, arg, into = torch.zeros(2, 5), torch.zeros(2, 5, dtype=INT), Into(out.emitted)
    refusals(
        "kernels/sampling:errors",
        lambda: kernels.sample(logits.double(), rows, settings, into),
        lambda: kernels.sample(logits, rows._replace(alive=rows.alive.bool()), settings, into),
        lambda: kernels.sample(logits, rows, settings._replace(seed=rows.token), into),
        lambda: kernels.sample(logits, rows, settings_of(2, "cpu", marks(2, 39, "cpu")), into),
        lambda: kernels.sample(logits, rows, settings, into, torch.zeros(2, 2)[:, 0]),
        lambda: kernels.pick(best, arg[:, :4], rows, into),
        lambda: kernels.pick(best[0], arg, rows, into),
        lambda: kernels.pick(best, arg, rows, Into(out.emitted.to("meta"))),
        lambda: kernels.pick(best, arg, rows, out._replace(embed=None)),
        lambda: kernels.sample(logits, rows, settings, out._replace(embed=out.embed[:30])),
        lambda: kernels.pick(best, arg, rows, out._replace(embed=out.embed.int())),
        lambda: kernels.pick(best, arg, rows, out._replace(x=out.x.bfloat16())),
    )
