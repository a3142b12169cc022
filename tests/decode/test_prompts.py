"""Attention of a prompt that is read in chunks: against its definition in fp64, and without a mask over all positions."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpubound as gb
from gpubound.decode import layer, request, transformer
from gpubound.decode.layer import attend_lower_right, attend_prompt, merged

from . import cases

B, H, K, D = 2, 4, 2, 8


def tensors(T: int, S: int, dtype=torch.float32, device="cpu", heads=(H, K), width=D) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (B, heads[0], T, width), (B, heads[1], S, width), (B, heads[1], S, width)
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def definition(q, k, v, start: int, window: int, scale: float, cap: float, sinks=None) -> torch.Tensor:
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q.double() @ k.transpose(2, 3) * scale
    scores = cap * (scores / cap).tanh() if cap else scores
    age = torch.arange(start, k.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    hidden = (age < 0) | (age >= (window or k.shape[2]))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 3, 9, 100])
@pytest.mark.parametrize(("start", "T"), [(0, 7), (7, 7), (7, 1), (20, 5)])
def test_a_chunk_attends_to_all_before_it(start, T, window, cap):
    q, k, v = tensors(T, start + T)
    got = attend_prompt(q, k, v, start, window, 0.4, cap)
    torch.testing.assert_close(got.double(), definition(q, k, v, start, window, 0.4, cap), atol=1e-5, rtol=1e-5)


def test_torchs_lower_right_bias_is_the_mask():
    """What a GPU is given, by torch's own fallback on a CPU."""
    q, k, v = tensors(5, 12)
    got = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(5, 12), scale=0.4, enable_gqa=True)
    torch.testing.assert_close(got.transpose(1, 2).double(), definition(q, k, v, 7, 0, 0.4, 0.0), atol=1e-5, rtol=1e-5)


def test_attention_to_two_sets_of_keys_is_merged_by_their_sums():
    q, k, v = tensors(5, 12, heads=(H, H))
    k[:, :, :7] -= 2.0 * q.mean(2, keepdim=True)  # the sums differ
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts = [attend(q, k[:, :, at], v[:, :, at], scale=0.4) for at in (slice(0, 7), slice(7, 12))]
    got = merged(*(t for y, lse in parts for t in (y, lse[..., None])))
    torch.testing.assert_close(got.transpose(1, 2).double(), definition(q, k, v, 11, 0, 0.4, 0.0)[:, -5:], atol=1e-5, rtol=1e-5)


def test_a_small_share_of_the_keys_keeps_its_digits_in_bf16(device):
    """From 3 % to half of the weight, and a mean that is eight times as large as that of the other keys: the shares, a term and
    the sum are rounded, each by 2^-9 at most. A share of 1 minus the rounded other loses 1.6e-2 of the result."""
    few, many = (draw.to(torch.bfloat16) for draw in tensors(64, 64, device=device, heads=(H, H))[:2])
    few, less = few * 8, torch.linspace(-3.5, 0.0, 64, device=device).expand(B, H, 64)[..., None]
    share = less.double().sigmoid()
    want = few.double() * share + many.double() * (1 - share)
    error = merged(few.clone(), less, many, torch.zeros_like(less)).double() - want
    assert (error.norm(dim=(1, 3)) / want.norm(dim=(1, 3))).max() <= 4 * 2**-9


class Largest(TorchDispatchMode):
    """keys: of the masks; seen: numbers of these; numbers: of all tensors."""

    def __init__(self):
        super().__init__()
        self.keys = self.seen = self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(found) if isinstance(t, torch.Tensor)):
            self.keys = max(self.keys, tensor.shape[-1]) if tensor.dtype == torch.bool else self.keys
            self.seen = max(self.seen, tensor.numel()) if tensor.dtype == torch.bool else self.seen
            self.numbers = max(self.numbers, tensor.numel())
        return found


def test_the_mask_of_a_window_ends_with_the_window():
    """It had a column for each position so far, and so k and v were read from the first."""
    q, k, v = tensors(4, 1004)
    with Largest() as largest:
        attend_prompt(q, k, v, 1000, 9, 0.4)
    assert largest.keys == 4 + 9 - 1


def test_the_mask_of_capped_scores_is_that_of_the_scores_in_memory(monkeypatch):
    """2,048 queries at the end of 32,768 positions had one of 64 MB in each layer."""
    monkeypatch.setattr(layer, "SCORES", B * H * 64 * 5)
    q, k, v = tensors(32, 64)
    with Largest() as largest:
        got = attend_prompt(q, k, v, 32, 0, 0.4, 1.5)
    assert largest.seen == 5 * 64
    torch.testing.assert_close(got.double(), definition(q, k, v, 32, 0, 0.4, 1.5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 9])
def test_sinks_hold_scores_only_with_a_cap(window, cap):
    """2 x 4 heads of 32 tokens. A mask is of all heads, and an output of 8 numbers a head."""
    q, k, v = tensors(32, 64)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 4.0])
    with Largest() as largest:
        got = attend_prompt(q, k, v, 32, window, 0.4, cap, sinks)
    assert largest.numbers == (B * H * 32 * ((32 + 9 - 1 if window else 64) + 1) if cap else 32 * 64)
    torch.testing.assert_close(got.double(), definition(q, k, v, 32, window, 0.4, cap, sinks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "Gemma3"])
def test_a_long_prompt_in_chunks_gives_the_logits_of_one(kind, monkeypatch):
    fast, ids = cases.shared(kind), cases.prompts(40)[0]
    want = torch.tensor(fast.score(ids))
    for size in (7, 16):
        monkeypatch.setattr(transformer, "CHUNK", size)
        torch.testing.assert_close(torch.tensor(fast.score(ids)), want, atol=1e-4, rtol=1e-4)
    assert isinstance(fast, gb.FastDecoder) and not fast.path


def test_long_prompts_are_padded_to_whole_chunks(monkeypatch):
    """A prompt of 33,000 tokens was read as one of 65,536."""
    sizes = {0: 0, 1: 16, 17: 32, 4096: 4096, 4097: 6144, 20_000: 20_480, 33_000: 34_816}
    assert {length: request.prompt_width(length) for length in sizes} == sizes
    fast, (ids,), read = cases.shared("Llama"), cases.prompts(42), []
    monkeypatch.setattr(request, "PROMPT_TOKENS", 32)
    monkeypatch.setattr(request, "CHUNK", 6)
    monkeypatch.setattr(fast.graphs, "prefill", lambda ids, lengths: read.append(ids.shape) or fast.body.prefill(ids, lengths))
    found = fast.generate(ids, max_new_tokens=4).tokens[0]
    assert read == [(1, 42)] and cases.likeliest(fast.model, ids, found) == found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 512), (torch.float32, 64)]
)
def test_no_dense_mask_on_a_gpu(dtype, width):
    """2,048 queries after 6,144 positions: a mask would take 16 MB, and repeated keys and values 67 MB."""
    torch.use_deterministic_algorithms(False)  # which would rule cuDNN's attention out
    T, S = 2048, 8192
    q, k, v = tensors(T, S, dtype, "cuda", heads=(8, 2), width=width)
    attend_lower_right(q, k, v, width**-0.5)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = attend_lower_right(q, k, v, width**-0.5)
    grown = torch.cuda.max_memory_allocated() - before - got.nbytes
    flash = dtype != torch.float32 and width <= 256
    # Of the chunk's own keys, of those before it, of both; their sums. Or k and v for 8 heads instead of 2, and sums in fp32.
    more = 2 * got.nbytes + 5 * 4 * B * 8 * T if flash else 8 * k.nbytes + 4 * got.numel()
    assert grown <= more + 4 * B * 8 * T + (1 << 20)  # and one fp32 for each query and head
    at = slice(T - 64, T)  # the definition of the last queries: that of all would take 2 GB
    want = definition(q[:, :, at], k, v, S - 64, 0, width**-0.5, 0.0)
    torch.testing.assert_close(got[:, at].double(), want, atol=2e-2 if dtype != torch.float32 else 1e-3, rtol=2e-2)


@pytest.mark.gpu
def test_chunks_of_a_long_prompt_round_as_the_models_own_forward_does():
    """Three whole chunks, by the kernel that SDPA chooses, and 57 tokens more."""
    torch.use_deterministic_algorithms(False)
    length = 3 * request.CHUNK + 57
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": length}
    model = cases.build("Llama", torch.bfloat16, "cuda", **sizes)
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.dim() > 1):
            weight.mul_(0.5)  # so that attention spreads over many keys
    ids = torch.randint(cases.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1)).cuda()
    fast, following = gb.decoder(model, 1, length, verify=False), ids[0, 1:, None]
    found = torch.tensor(fast.score(ids.tolist())[0], device="cuda")
    with torch.no_grad():
        logits = [model(ids).logits, model.float()(ids).logits]
        own, wide = (one[0, :-1].float().log_softmax(-1).gather(-1, following)[:, 0] for one in logits)
    assert (found - wide).norm() <= 2 * (own - wide).norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "width", "window", "sunk"),
    [
        (torch.bfloat16, 64, 0, True), (torch.float16, 128, 128, True), (torch.float32, 64, 0, True),
        (torch.float32, 64, 128, True), (torch.bfloat16, 128, 4096, False), (torch.bfloat16, 256, 4096, False),
    ],
)  # fmt: skip
def test_no_scores_or_masks_with_sinks_and_windows_on_a_gpu(dtype, width, window, sunk):
    """2,048 queries after 6,144 positions: a part of the scores would take 256 MB, all of them 1 GB, and the distances that a
    window's mask is made of 100 MB."""
    T, S = 2048, 8192
    q, k, v = tensors(T, S, dtype, "cuda", heads=(8, 2), width=width)
    sinks = torch.linspace(-1.0, 4.0, 8, device="cuda").to(dtype) if sunk else None
    attend_prompt(q, k, v, S - T, window, width**-0.5, 0.0, sinks)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = attend_prompt(q, k, v, S - T, window, width**-0.5, 0.0, sinks)
    # copies in the kernel's layout, k and v for each head in fp32; results, and fp32 for each query and head
    copies = 2 * k.nbytes * (4 if dtype == torch.float32 else 1) + q.nbytes
    assert torch.cuda.max_memory_allocated() - before <= copies + 4 * got.nbytes + 8 * 4 * B * 8 * T + (1 << 20)
    at = slice(T - 64, T)
    want = definition(q[:, :, at], k, v, S - 64, window, width**-0.5, 0.0, sinks)
    torch.testing.assert_close(got[:, at].double(), want, atol=2e-2 if dtype != torch.float32 else 1e-3, rtol=2e-2)
