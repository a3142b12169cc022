"""The figures under a text of `gpubound generate`: which tokens, steps and bytes count, and that nothing waits on a GPU."""

import json

import pytest

from gpubound.cli import main
from gpubound.decode.request import Generated, Generation
from gpubound.generate.speed import Speed
from tests.messages import message

from . import by_heart
from .by_heart import CPU

pytestmark = pytest.mark.usefixtures("one_thread")
reference, ckpt = by_heart.reference, by_heart.ckpt  # fixtures


def test_steps_beyond_the_last_token_do_not_count_as_work():
    speed = Speed(CPU)
    speed._rate = 1e9
    sequences = [Generated([1], [2] * 20), Generated([1], [2] * 5)]
    speed.add(Generation(sequences, 2.0, 0.5, launches=5, steps=40, row_steps=25, bytes_read=40_000_000))
    assert (speed.tokens, speed.steps, speed.bytes_read) == (25, 20, 20_000_000)
    assert speed.line() == message("cli_generate_figures:steps_beyond_the_last_to")
    speed.merge(speed)
    assert speed.tokens_per_s == 12.5 and speed.first_token_s == 0.5


def test_a_launch_that_overshot_is_counted_as_far_as_it_was_wanted():
    """257 steps for 256 tokens, of which 256 are in bytes_read."""
    speed = Speed(CPU)
    speed.add(Generation([Generated([1], [2] * 256)], 2.0, 0.5, 12, 257, 256, bytes_read=256_000, wanted=256))
    assert (speed.steps, speed.bytes_read) == (256, 256_000)


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits(ckpt, capsys, monkeypatch):
    monkeypatch.undo()
    code = main(["generate", str(ckpt), "--prompt", "the cat", "--ignore-eos", "--json", "--device", "cuda"])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert code == 0 and found["syncs"] == 0 and found["tokens"] == 256
    assert found["sequences"][0]["text"].startswith(" sat on the mat and slept.") and said.err.endswith("host syncs: 0\n")
