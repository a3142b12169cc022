"""Words between devices, by devices that are all this one: what is sent, what is taken, and what has not come."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.peer_exchange import Mail, addresses_of
from gpubound.kernels.registry import load
from tests.messages import refusals

from .cases import assert_inside, banded, draw, pairwise

SOURCES = pytest.mark.parametrize("source", ["triton", "reference"])


def mails(device, count: int, columns: int, senders: int | None = None, epoch: int = 1, number: int = 0) -> list[Mail]:
    """What `count` devices see, each of which sends to all."""
    boxes = tuple(torch.zeros(senders or count, 4, columns, device=device, dtype=torch.int64) for _ in range(count))
    state = torch.tensor([epoch, 3], device=device, dtype=torch.int32)
    found = addresses_of(boxes, device)
    return [Mail(boxes, rank, rank, state, number, found) for rank in range(count)]


@pairwise
@SOURCES
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("columns", [5, 1300])  # more than a program takes
def test_every_device_adds_the_words_of_all_in_one_order(device, source, count, columns):
    all_mail, parts = mails(device, count, columns), [draw(device, torch.float32, 2, columns, seed=n) for n in range(count)]
    want = x = draw(device, torch.float32, 2, columns, seed=9)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    for mail, part in zip(all_mail, parts):
        load(source, "send_words")(part, mail)
    for mail in all_mail:
        whole, out = banded((2, columns), device)
        load(source, "take_words")(out.copy_(x), mail, True)
        assert_inside(whole, out)
        assert torch.equal(out, want + total)


@SOURCES
def test_terms_are_added_before_they_are_sent(device, source):
    """In their order: the bits are those of a sum made before."""
    y, more = draw(device, torch.float32, 2, 600), draw(device, torch.float32, 2, 3, 600, seed=1)
    mail, out = mails(device, 1, 600)[0], torch.zeros(2, 600, device=device)
    load(source, "send_words")(y, mail, 0, more)
    load(source, "take_words")(out, mail)
    assert torch.equal(out, y + more[:, 0] + more[:, 1] + more[:, 2])


@SOURCES
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_columns_of_several_devices_come_together(device, source, dtype):
    """Bits are moved, not numbers: a NaN and a -0 arrive as they were."""
    parts = [draw(device, torch.float32, 2, width, seed=width) for width in (7, 20, 3)]
    parts[1][0, 2], parts[2][1, 0] = float("nan"), -0.0
    home, column = mails(device, 1, 30)[0], 0
    for part in parts:
        load(source, "send_words")(part.view(dtype), home._replace(own=None), column)
        column += part.shape[1]
    out = torch.zeros(2, 30, device=device, dtype=dtype)
    load(source, "take_words")(out, home)
    assert torch.equal(out.view(torch.int32), torch.cat(parts, 1).view(torch.int32))


@SOURCES
def test_what_has_not_come_is_no_number(device, source):
    """Nor is what came in the exchange before, or in the epoch before. Stamps wrap."""
    mail = mails(device, 1, 6, epoch=2**31 - 1, number=2)[0]
    y, out = torch.ones(1, 6, device=device), torch.zeros(1, 6, device=device)
    load(source, "send_words")(y[:, :4].contiguous(), mail)
    load(source, "take_words")(out, mail)
    assert out.isnan().tolist() == [[False] * 4 + [True] * 2]
    load(source, "take_words")(out, mail._replace(number=3))
    assert out.isnan().all()
    mail.state[0] += 1
    places = torch.zeros(1, 6, device=device, dtype=torch.int32)
    load(source, "take_words")(places, mail)
    assert places.tolist() == [[-1] * 6]
    load(source, "send_words")(y, mail)
    load(source, "take_words")(out, mail)
    assert torch.equal(out, y)
    if source == "triton":
        assert mail.state[1] == 0  # it has asked in vain, and asks no more


@pairwise
@SOURCES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_that_devices_share(device, source, dtype, rows):
    """Each has some columns of the weight, the first the bias. The sum is the same on all, and that of the whole weight."""
    h, weight = draw(device, dtype, rows, 96), draw(device, dtype, 40, 96, seed=1)
    bias, x = draw(device, dtype, 40, seed=2), draw(device, torch.float32, rows, 40, seed=3)
    want = x.double() + h.double() @ weight.double().t() + bias.double()
    all_mail, found = mails(device, 2, 40), []
    for mail, cut in zip(all_mail, (slice(0, 32), slice(32, 96))):
        given = h[:, cut].contiguous(), weight[:, cut].contiguous(), bias if mail.own == 0 else None
        load(source, "send_product")(*given, mail)
    for mail in all_mail:
        found.append(load(source, "take_words")(x.clone(), mail, True))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), want, rtol=0, atol=1e-4)


def test_wrong_arguments_are_named(device):
    mail, y = mails(device, 2, 6, senders=2)[0], torch.ones(2, 6, device=device)
    refusals(
        "kernels/peer_exchange:wrong_arguments_are_named",
        lambda: kernels.send_words(y.half(), mail),
        lambda: kernels.send_words(y, mail, 0, y),
        lambda: kernels.send_words(y, mail, 1),
        lambda: kernels.take_words(y.int(), mail, added=True),
        lambda: kernels.take_words(y, mail),
    )
    with pytest.raises(ValueError, match=r"mail\.own must be the number of a box of 6 columns on .*, got None"):
        kernels.take_words(y, mail._replace(own=None), added=True)
