"""Attention's backward is compiled ahead: each shape once, in a thread, on other tensors, and only where it will be needed."""

import queue
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from gpubound.graph import capture, recording as ahead
from gpubound.graph.recording import attention_ahead, attention_of


@pytest.fixture
def ran(monkeypatch):
    """Record (thread is this one, the shape of q, whether it is a user's tensor) of each call below the hook."""
    own, calls = F.scaled_dot_product_attention, []

    def attend(q, k, v, **options):
        calls.append((threading.current_thread() is threading.main_thread(), *q.shape[1:3]))
        return own(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    return calls


def heads(count: int, tokens: int, gradient: bool = True) -> torch.Tensor:
    return torch.randn(1, tokens, count, 8).transpose(1, 2).requires_grad_(gradient)


def test_each_shape_runs_once_in_a_thread(ran):
    q, k = heads(4, 6), heads(2, 6)
    with attention_ahead("stream"):
        for _ in range(2):
            out = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        F.scaled_dot_product_attention(heads(4, 5), heads(4, 5), heads(4, 5), dropout_p=0.5)
        F.scaled_dot_product_attention(*(heads(4, 7, gradient=False) for _ in range(3)))
    assert [call[1:] for call in ran if not call[0]] == [(4, 6)] and sum(call[0] for call in ran) == 4
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_without_a_stream_or_cudnn_nothing_is_hooked(ran, monkeypatch):
    for stream, enabled in ((None, True), ("stream", False)):
        monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda enabled=enabled: enabled)
        with attention_ahead(stream):
            F.scaled_dot_product_attention(*(heads(4, 6) for _ in range(3)))
    assert all(call[0] for call in ran)


def test_no_thread_is_left_after_an_error(ran, monkeypatch):
    ended = []
    monkeypatch.setattr(ahead, "_run", lambda *arguments: (time.sleep(0.05), ended.append(True)))
    with pytest.raises(ZeroDivisionError), attention_ahead("stream"):
        F.scaled_dot_product_attention(*(heads(4, 6) for _ in range(3)))
        _ = 1 / 0
    assert ended


def test_attention_of_a_batch_begins_behind_a_part_of_its_first_row(ran, monkeypatch):
    def heads_of(rows, tokens):
        packed = torch.randn(rows, tokens, 8, 16)  # q, and k beside v
        return [t.transpose(1, 2) for t in (packed[:, :, :4].contiguous(), packed[:, :, 4:6], packed[:, :, 6:])]

    begun, options = queue.Queue(), {"attn_mask": None, "is_causal": True, "enable_gqa": True}
    monkeypatch.setattr(ahead, "_run", lambda stream, own, *rest: begun.put(rest))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    there = torch.device("cuda", 0)
    with attention_of(3, 7, there):
        for _ in range(2):
            F.scaled_dot_product_attention(*heads_of(1, 5), **options)
        F.scaled_dot_product_attention(*heads_of(1, 5), attn_mask=torch.ones(5, 5).bool(), enable_gqa=True)
        F.scaled_dot_product_attention(*(t.contiguous() for t in heads_of(1, 5)), **options)
        assert begun.empty()  # cuDNN may be off inside
    batch = tuple((tuple(t.shape), t.stride(), t.dtype) for t in heads_of(3, 7))
    assert begun.get(timeout=60) == (batch, there, options) and begun.empty()
    with attention_of(3, 7, torch.device("cpu")):
        F.scaled_dot_product_attention(*heads_of(1, 5), **options)
    assert begun.empty()


@pytest.mark.gpu
def test_a_captured_backward_is_eagers(device):
    """With another thread's kernels between those of the first watched call; 16-bit sums of 64 keys are 2^-8 apart."""
    q, k = (torch.randn(2, 64, count, 64, device=device, dtype=torch.bfloat16).transpose(1, 2) for count in (8, 2))

    def gradient(x):
        leaf = x.detach().requires_grad_()
        out = F.scaled_dot_product_attention(leaf, k, k, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out.float().sum(), leaf)[0]

    captured = capture(gradient, q, tolerance=5e-2)
    torch.testing.assert_close(captured(q), gradient(q), atol=2e-2, rtol=2e-2)
