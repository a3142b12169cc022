"""Both shuffles are bijections for every size, differ by seed and epoch, and mix as well as a random permutation."""

import math

import pytest
import torch

from gpubound.data.source import EPOCHS, KEYS, Scatter, mix, order, signed

ALL = (1 << 64) - 1


@pytest.mark.parametrize("sizes", [range(1, 130), [997, 1024, 65_537, 250_001]], ids=["small", "large"])
def test_one_to_one(sizes):
    for n in sizes:
        scatter = Scatter(n, seed=n)
        for epoch in (0, 1, 4095, 100_000):
            rows = scatter(torch.arange(n), torch.tensor(epoch))
            assert torch.equal(rows.sort().values, torch.arange(n)), (n, epoch)
        assert torch.equal(order(n, n, 3).sort().values, torch.arange(n))


def oracle(n: int, seed: int, epoch: int, place: int) -> int:
    """Scatter in plain integers, one place at a time."""
    golden, word = 0x9E3779B97F4A7C15, mix(seed)

    def key(k):
        z = (golden * (epoch % EPOCHS * KEYS + k + 1) + word) & ALL
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & ALL
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & ALL
        return signed(z ^ (z >> 31))

    def noise(salt, x):
        z = (salt + x * golden) & ALL
        return signed(z * z & ALL) >> 33

    columns = max(min(2, n), math.isqrt(n))
    lines = n // columns
    for k in range(0, KEYS, 3):
        turned = (place + key(k) % n) % n
        line, column = divmod(turned, columns)
        column = (column + noise(key(k + 1), line)) % columns
        line = (line + noise(key(k + 2), column)) % lines
        place = column + line * columns if turned < columns * lines else turned
    return place


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 1009])
def test_scatter_against_plain_integers(n):
    scatter = Scatter(n, seed=5)
    for epoch in (0, 3, 5000):
        got = scatter(torch.arange(n), torch.tensor(epoch)).tolist()
        assert got == [oracle(n, 5, epoch, place) for place in range(n)]


def test_many_epochs_at_once():
    scatter = Scatter(50, seed=1)
    epochs = torch.tensor([[0, 1, 2], [7, 7, 9]])
    together = scatter(torch.arange(50).expand(2, 3, 50), epochs)
    for i in range(2):
        for j in range(3):
            assert torch.equal(together[i, j], scatter(torch.arange(50), epochs[i, j]))


def test_seed_and_epoch_each_make_another_order():
    orders = {tuple(order(40, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    scatters = {tuple(Scatter(40, seed)(torch.arange(40), torch.tensor(e)).tolist()) for seed in range(4) for e in range(4)}
    assert len(orders) == len(scatters) == 16
    assert mix(1, 2) != mix(2, 1) and mix(-1) == mix(ALL)


def test_every_place_draws_every_row_alike():
    """Over 4,096 epochs the count of (place, row) is chi-squared with (n - 1)² degrees of freedom; 5 standard deviations are
    allowed."""
    for n in (5, 12, 50):
        rows = Scatter(n, seed=1)(torch.arange(n).expand(EPOCHS, n), torch.arange(EPOCHS))
        counts = torch.stack([torch.bincount(rows[:, place], minlength=n) for place in range(n)]).double()
        chi, freedom = ((counts - EPOCHS / n) ** 2 / (EPOCHS / n)).sum().item(), (n - 1) ** 2
        assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom), n
