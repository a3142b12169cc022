"""Layers with a window keep its last positions alone: the same tokens as with all positions, in a fraction of the memory."""

from typing import Any

import pytest
import torch

import gpubound as gb
from gpubound.decode import transformer
from gpubound.decode.kv_cache import PAGE, Cache, CachedLayer, WindowRing, cached_layers
from gpubound.decode.runner import RunnerConfig
from gpubound.kernels import dispatch
from gpubound.models.registry import reader_of
from gpubound.watch import watch

from . import cases


def full_every(n: int, layers: int) -> list[str]:
    return ["full_attention" if number % n == n - 1 else "sliding_attention" for number in range(layers)]


# Published shapes: heads of queries; (window, heads of keys, their width): layers, that of layer 0 first; what else differs.
PUBLISHED: dict[str, tuple[int, dict, dict]] = {
    "Cohere2": (32, {(4096, 8, 128): 24, (0, 8, 128): 8}, {"layer_types": full_every(4, 32)}),  # Command R7B
    "Exaone4": (40, {(4096, 8, 128): 48, (0, 8, 128): 16}, {"layer_types": full_every(4, 64)}),  # 32B
    "Gemma2": (16, {(4096, 8, 256): 21, (0, 8, 256): 21}, {"layer_types": full_every(2, 42)}),  # 9B
    "Gemma3": (32, {(1024, 16, 128): 52, (0, 16, 128): 10}, {"layer_types": full_every(6, 62)}),  # 27B
    "Gemma4": (
        8,
        {(512, 2, 256): 20, (0, 2, 512): 4},
        {  # E4B, whose last layers have the keys of others
            "layer_types": full_every(6, 42),
            "global_head_dim": 512,
            "num_kv_shared_layers": 18,
        },
    ),
    "Gemma4Unified": (
        32,
        {(1024, 16, 256): 50, (0, 4, 512): 10},
        {"layer_types": full_every(6, 60), "global_head_dim": 512, "num_global_key_value_heads": 4},
    ),
    "GptOss": (64, {(128, 8, 64): 12, (0, 8, 64): 12}, {"layer_types": full_every(2, 24)}),  # 20b
    "Ministral": (32, {(32768, 8, 128): 27, (0, 8, 128): 9}, {"layer_types": full_every(4, 36)}),  # 8B
    "Mistral": (32, {(4096, 8, 128): 32}, {}),  # 7B
    "Olmo3": (32, {(4096, 32, 128): 24, (0, 32, 128): 8}, {"layer_types": full_every(4, 32)}),  # 7B
    "Phi3": (32, {(2047, 32, 96): 32}, {"hidden_size": 3072}),  # mini
    "Starcoder2": (24, {(4096, 2, 128): 30}, {"hidden_size": 3072}),  # 3b
    "VaultGemma": (4, {(512, 4, 256): 13, (0, 4, 256): 13}, {"layer_types": full_every(2, 26)}),  # 1B
}
LENGTH = 150  # more than two rounds of a ring of one page
ON_CPU = {"speculate": 3}  # several tokens a step: not the CPU's own step, which keeps all positions


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Read prompts in chunks that are no multiple of a page, several for a ring."""
    monkeypatch.setattr(transformer, "CHUNK", 50)


def decoder(kind: str, device, **options) -> gb.FastDecoder:
    model = cases.build(kind, device=device, max_position_embeddings=LENGTH)
    fast = gb.decoder(model, 3, LENGTH, verify=False, **options)
    assert fast.path == "" and any(isinstance(store, WindowRing) for store in fast.body.cache.stores)
    return fast


@pytest.mark.parametrize("kind", ["Mistral", "Gemma3", "Gemma4", "GptOss"])
def test_tokens_are_those_of_the_whole_text(kind, device):
    """Prompts that are shorter than the ring and longer in one batch: padding may not overwrite a short row's keys."""
    fast = decoder(kind, device, **ON_CPU)
    fast.body.poison()
    given = cases.prompts(131, 3, 70)
    for prompt, found in zip(given, fast.generate(given, max_new_tokens=12).tokens):
        assert cases.likeliest(fast.model, prompt, found) == found


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_tokens_of_eight_bits_are_those_with_all_positions(cache, device, monkeypatch):
    given, found = cases.prompts(60, 5), []
    for pages in (1, 99):  # of a ring
        with monkeypatch.context() as patch:
            patch.setattr("gpubound.decode.kv_cache.ring_pages", lambda *_, pages=pages: pages)
            fast = gb.decoder(cases.build("Gemma3", device=device), 2, cases.ROOM + 60, cache=cache, verify=False)
        assert fast.body.cache.ringed == (pages == 1)
        found.append(fast.generate(given, max_new_tokens=16, logprobs=True).sequences)
    for ring, whole in zip(*found):
        assert ring.tokens == whole.tokens and ring.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


@pytest.mark.slow
def test_a_queue_of_prompts(device):
    """Rows that are refilled, several samples of a prompt, and rows that move, over pages for the layers without a window."""
    fast = decoder("Gemma3", device, pages=9)
    given = cases.prompts(80, 4, 66)
    for one in fast.rollout(given, n=2, max_new_tokens=[6, 25, 9], temperature=0.0):
        assert cases.likeliest(fast.model, given[one.prompt], one.tokens) == one.tokens


@pytest.mark.slow
def test_steps_of_a_draft_that_are_taken_back_overwrite_no_key_of_the_window(monkeypatch):
    """A draft writes the keys of all its tokens, and begins again after the last right one."""
    monkeypatch.setattr("gpubound.decode.cpu_step.fits", lambda _: False)
    model, other = (
        cases.build("Mistral", num_hidden_layers=layers, sliding_window=PAGE, max_position_embeddings=LENGTH)
        for layers in (2, 1)
    )
    given, seen = cases.prompts(80)[0], []
    for rings in (True, False):
        with monkeypatch.context() as patch:
            if not rings:
                patch.setattr("gpubound.decode.kv_cache.ring_pages", lambda *_: 99)
            fast = gb.decoder(model, 1, LENGTH, speculate=gb.Draft(other, 6), verify=False)
        draft: Any = fast.stepper.drafting
        assert draft.cache.ringed == rings
        step, logits = draft.step, []
        draft.step = lambda *inputs, step=step, logits=logits: logits.append(step(*inputs).clone()) or logits[-1]
        assert fast.generate(given, max_new_tokens=5).tokens_a_step < 6  # some drafts were wrong
        seen.append(torch.cat(logits))
    torch.testing.assert_close(*seen, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"cache": "fp8"}, {"pages": 9}], ids=str)
def test_prompts_and_rollouts_never_wait_for_the_device(form, sim):
    fast = gb.decoder(cases.build("Gemma3", device=sim, max_position_embeddings=LENGTH), 3, LENGTH, verify=False, **form)
    assert fast.path == "" and fast.body.cache.ringed
    given = cases.prompts(100, 3, 66)
    want = fast.generate(given, max_new_tokens=4).tokens
    with watch() as ledger:
        assert fast.generate(given, max_new_tokens=4).tokens == want
        found = {one.prompt: one.tokens for one in fast.rollout(given, n=2, max_new_tokens=[2, 4, 3], temperature=0.0)}
    assert ledger.totals["syncs"] == 0, str(ledger)
    assert [found[number] for number in range(3)] == [want[0][:2], want[1], want[2][:3]]


@pytest.mark.slow
def test_kernels_read_a_ring_by_its_table(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_verdicts", {})
    fast = decoder("Mistral", torch.device("cpu"))
    prompt = cases.prompts(126)[0]
    fast.body.poison()
    found = fast.generate(prompt, max_new_tokens=4).tokens[0]  # across the end of a round
    assert cases.likeliest(fast.model, prompt, found) == found


class TestMemory:
    @pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "GptOss" else [pytest.mark.slow]) for k in PUBLISHED])
    def test_a_cache_has_the_bytes_of_published_windows_heads_and_layers(self, kind):
        queries, layers, more = PUBLISHED[kind]
        (window, heads, width), *_ = layers
        sizes = {"num_attention_heads": queries, "num_key_value_heads": heads, "head_dim": width, "sliding_window": window}
        length = 128 * 1024
        with torch.device("meta"):
            model = cases.build(
                kind,
                device="meta",
                num_hidden_layers=len(more.get("layer_types", range(sum(layers.values())))),
                max_position_embeddings=length,
                **sizes,
                **more,
            )
        reader = reader_of(model)
        assert reader is not None
        for rows, tokens in ((1, 1), (3, 4)):
            cache = Cache(
                RunnerConfig(rows, length, tokens), cached_layers(reader.layers()), torch.bfloat16, torch.device("meta")
            )
            kept = sum(
                count * heads * width * (-(-(window + tokens - 1) // 64) * 64 if window else length)
                for (window, heads, width), count in layers.items()
            )
            assert cache.nbytes == 2 * 2 * rows * kept  # keys and values, 2 bytes a number

    def test_a_ring_has_room_for_the_tokens_of_a_step(self):
        for window, tokens, pages in ((PAGE, 1, 1), (PAGE, 2, 2), (PAGE - 4, 5, 1), (PAGE - 3, 5, 2)):
            build = RunnerConfig(2, 1024, tokens)
            (store,) = Cache(build, {0: CachedLayer(1, 8, window)}, torch.float32, torch.device("cpu")).stores
            assert isinstance(store, WindowRing) and store.k.shape == (1, 2 * pages, 1, PAGE, 8)

    def test_windows_as_long_as_the_cache_need_no_ring(self):
        layers = {0: CachedLayer(1, 8, 65), 1: CachedLayer(1, 8)}
        cache = Cache(RunnerConfig(1, 128), layers, torch.float32, torch.device("cpu"))
        assert not cache.ringed and len(cache.stores) == 1

    def test_layers_of_other_shapes_and_layers_that_share_keys(self):
        """Gemma 4 E4B's shape: of 42 layers the last 18 share keys; every sixth has no window and heads twice as wide."""
        length, window, last = 128 * 1024, 512, {False: 22, True: 23}
        layers = {}
        for number in range(42):
            whole = number % 6 == 5
            source = last[whole] if number > 23 else None
            layers[number] = CachedLayer(2, 512 if whole else 256, 0 if whole else window, source)
        cache = Cache(RunnerConfig(1, length), layers, torch.bfloat16, torch.device("meta"))
        token = 2 * 2 * 2 * 256
        assert cache.nbytes == (4 * 2 * length + 20 * window) * token
        assert cache.bytes_read([length]) == (7 * 2 * length + 35 * window) * token

    def test_the_table_shows_what_layers_keep(self):
        fast = decoder("Gemma3", "cpu", **ON_CPU)
        assert f"1 layers keep {PAGE} tokens for a window of 9" in str(fast)


def test_prompts_with_chunks_equal_transformers_logits(device):
    """Log-probabilities of a text that is longer than a ring, read in chunks."""
    fast = decoder("Gemma3", device, **ON_CPU)
    text = cases.prompts(140)[0]
    want = cases.logits(fast.model, text[:-1]).log_softmax(-1)[range(139), text[1:]]
    torch.testing.assert_close(torch.tensor(fast.score(text)[0]), want.cpu(), atol=1e-4, rtol=1e-4)
