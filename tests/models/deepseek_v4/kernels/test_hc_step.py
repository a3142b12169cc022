"""Hyper-connections of a step: both mirrors beside hc_pre and hc_post in fp64, rows alone and together, sentences."""

import pytest
import torch

from gpubound.kernels import send_words
from gpubound.kernels.peer_exchange import POLLS
from gpubound.kernels.registry import load
from gpubound.models.deepseek_v4 import kernels
from gpubound.models.deepseek_v4.kernels.hyper_connections import hc_post_reference, hc_pre_reference, stretch, sums_shape
from tests.kernels.cases import SOURCES, draw
from tests.kernels.test_peer_exchange import mails

EPS, NORM_EPS, ROUNDS = 1e-6, 1e-5, 20


def given(device, tokens, streams, width):
    products = (2 + streams) * streams
    x, weight = (
        draw(device, torch.float32, tokens, streams, width),
        draw(device, torch.float32, products, streams * width, seed=1),
    )
    return x, weight * width**-0.5, draw(device, torch.float32, 3, seed=2), draw(device, torch.float32, products, seed=3)


def sums_of(source, x, weight):
    return load(source, "hc_sums")(x, weight, torch.empty(sums_shape(len(x), x.shape[2], len(weight)), device=x.device))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("tokens", "streams", "width"), [(1, 4, 40), (3, 4, 100), (2, 2, 16)])
def test_a_step_is_what_hc_pre_and_hc_post_are(source, tokens, streams, width, device):
    x, weight, scale, base = given(device, tokens, streams, width)
    wide = [t.double() for t in (x, weight, scale, base)]
    u, post, comb = hc_pre_reference(*wide, EPS, NORM_EPS, ROUNDS)
    sums = sums_of(source, x, weight)
    read = load(source, "hc_read")(x, sums, scale, base, EPS, NORM_EPS, torch.empty(tokens, width, device=device))
    torch.testing.assert_close(read.double(), u, rtol=1e-4, atol=1e-5)
    y, other = draw(device, torch.float32, tokens, width, seed=4), draw(device, torch.float32, 7, streams * width, seed=5)
    following = torch.empty(sums_shape(tokens, width, 7), device=device)
    more = draw(device, torch.float32, tokens, 2, width, seed=6)
    all_of_it = x, y, sums, scale, base, EPS, NORM_EPS, ROUNDS, more, other
    out, following = load(source, "hc_write")(*all_of_it, torch.empty_like(x), following)
    want = hc_post_reference(wide[0], y.double() + more.double().sum(1), post, comb)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
    flat = out.double().flatten(1)
    torch.testing.assert_close(following.double().sum(0)[:, :7], flat @ other.double().t(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(following.double().sum(0)[:, 7], flat.square().sum(1), rtol=1e-4, atol=1e-4)


def test_a_token_has_the_same_bits_alone(device):
    x, weight, scale, base = given(device, 3, 4, 40)
    y, found = draw(device, torch.float32, 3, 40, seed=4), []
    for some in (slice(0, 3), slice(1, 2)):
        part = x[some].contiguous()
        sums = sums_of("triton", part, weight)
        rest = scale, base, EPS, NORM_EPS, ROUNDS, None, None, torch.empty_like(part), None
        out = load("triton", "hc_write")(part, y[some], sums, *rest)
        found.append((sums, out[0]))
    assert found[0][0][:, 1:2].equal(found[1][0]) and found[0][1][1:2].equal(found[1][1])


@pytest.mark.parametrize("source", SOURCES)
def test_what_comes_by_mail_is_as_if_it_had_been_there(source, device):
    """As the sum does that was added up before; a word that has not come is NaN in its column alone."""
    x, weight, scale, base = given(device, 2, 4, 40)
    sums, devices = sums_of(source, x, weight), mails(device, 3, 40)
    parts = [draw(device, torch.float32, 2, 40, seed=seed) for seed in (4, 5, 6)]
    for mail, part in zip(devices, parts):
        send_words(part, mail)
    rest = sums, scale, base, EPS, NORM_EPS, ROUNDS, None, weight
    here, there = (
        load(source, "hc_write")(x, y, *rest, torch.empty_like(x), torch.empty_like(sums))
        for y in (parts[0] + parts[1] + parts[2], devices[1])
    )
    for one, other in zip(here, there):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * one.abs().max().item())
    devices[1].box[2, 0, 7] = 0
    late = load(source, "hc_write")(x, devices[1], *rest, torch.empty_like(x), torch.empty_like(sums))[0]
    assert late[0, :, 7].isnan().all() and late.isnan().sum() == 4


@pytest.mark.gpu
@pytest.mark.parametrize("senders", [1, 2, 3])
@pytest.mark.parametrize("width", [40, 4096])
def test_words_that_come_while_they_are_asked_for(senders, width, device):
    """What one thread of a program has seen, all have: another stream writes the words while they are waited for."""
    x, weight, scale, base = given(device, 1, 4, width)
    sums, sent = sums_of("triton", x, weight), mails(device, senders, width)
    sent[0].state[1] = POLLS
    part, beside, bad = draw(device, torch.float32, 1, width), torch.cuda.Stream(), torch.zeros((), device=device)
    rest = ROUNDS, None, weight, torch.empty_like(x), torch.empty_like(sums)

    def send(now: list) -> None:
        for mail in now:
            load("triton", "send_words")(part, mail)

    def write(now: list) -> torch.Tensor:
        return load("triton", "hc_write")(x, now[0], sums, scale, base, EPS, NORM_EPS, *rest)[0]

    send(sent)  # both compile
    write(sent)
    for number in range(1, 200):
        now = [mail._replace(number=number) for mail in sent]
        beside.wait_stream(torch.cuda.current_stream())
        out = write(now)
        with torch.cuda.stream(beside):
            send(now)
        bad += out.isnan().sum()
        torch.cuda.current_stream().wait_stream(beside)
    assert bad == 0


def test_pieces():
    assert stretch(40) == 16 and stretch(4096) == 64 and stretch(7168) == 128
    assert sums_shape(1, 7168, 24) == (56, 1, 32) and sums_shape(2, 40, 24) == (3, 2, 32)


def test_wrong_arguments():
    x, weight, scale, base = given(torch.device("cpu"), 1, 4, 40)
    mail, rest = mails(torch.device("cpu"), 2, 40)[0], (kernels.hc_sums(x, weight), scale, base, 0.1, 0.1, 2)
    for op, arguments, named in (
        ("hc_sums", (x.half(), weight), "x must be .* torch.float32"),
        ("hc_sums", (x, weight[:, :9]), r"weight must be .* \(products, 160\)"),
        ("hc_read", (x, weight, scale, base, 0.1, 0.1), r"sums must be .* \(3, 1, 32\)"),
        ("hc_write", (x, x, *rest), r"y must be .* \(1, 40\)"),
        ("hc_write", (x, mail, *rest, x), "got y by peer exchange and more"),
    ):
        with pytest.raises(ValueError, match=f"^{op}: {named}"):
            getattr(kernels, op)(*arguments)
