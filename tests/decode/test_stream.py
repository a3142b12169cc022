"""A stream gives what generate gives, as it comes; leaving it is no harm."""

import functools
import gc
import subprocess

import pytest
import torch

import gpubound as gb
from gpubound.decode import certificate

from .. import forked
from ..processes import plain_environment
from . import cases

SAMPLED = {"temperature": 1.2, "top_p": 0.9, "seed": 5}


@functools.cache
def writer(k: int | str = "auto") -> gb.FastDecoder:
    """Speaks bytes: its texts hold characters of several tokens and bytes that are none."""
    return gb.decoder(cases.build("Mistral", vocab_size=256), 4, cases.ROOM, k=k, tokenizer=cases.Bytes(), verify=False)


def gathered(stream, rows: int, empty):
    found = [empty] * rows
    for row, new in stream:
        assert new  # nothing is no news
        found[row] = found[row] + new
    return found


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_tokens_as_generate(how):
    fast = cases.shared("Mistral")
    want = fast.generate(cases.prompts(), max_new_tokens=45, stop=[5, 7], **how).tokens
    assert gathered(fast.stream(cases.prompts(), max_new_tokens=45, stop=[5, 7], **how), 3, []) == want


@pytest.mark.parametrize("k", [1, 8, "auto"])
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_text_as_generate(k, how):
    fast = writer(k)
    given = ["Once upon a time", "é", "naïve ☕"]
    want = fast.generate(given, max_new_tokens=24, **how)
    assert gathered(fast.stream(given, max_new_tokens=24, **how), 3, "") == want.texts
    assert want.texts == [bytes(row).decode(errors="replace") for row in want.tokens]
    assert writer("auto").generate(given, max_new_tokens=24, **how).texts == want.texts


def a_stop(text: str) -> str:
    """Three characters from the middle of a text, none of them a replacement, that come there for the first time."""
    for at in range(len(text) // 3, len(text) - 3):
        if "\ufffd" not in text[at : at + 3] and text.find(text[at : at + 3]) == at:
            return text[at : at + 3]
    raise AssertionError(f"no stop string in {text!r}")


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, "auto"])
def test_a_stop_string_ends_a_row_and_is_never_shown(k):
    fast = writer(k)
    given = ["Once upon a time", "Another"]
    whole = fast.generate(given, max_new_tokens=60, **SAMPLED)
    stop = a_stop(whole.texts[0])
    found = fast.generate(given, max_new_tokens=60, stop=stop, logprobs=True, **SAMPLED)
    ended, other = found.sequences
    assert (ended.finish, ended.text) == ("stop string", whole.texts[0][: whole.texts[0].index(stop)])
    assert ended.tokens == whole.tokens[0][: len(ended.tokens)] and len(ended.tokens) < 60
    assert len(ended.logprobs) == len(ended.tokens) and fast.tokenizer.decode(ended.tokens).startswith(ended.text)
    if stop not in whole.texts[1]:
        assert (other.finish, other.text, other.tokens) == ("length", whole.texts[1], whole.tokens[1])
    shown = ""
    for row, piece in fast.stream(given, max_new_tokens=60, stop=stop, **SAMPLED):
        if row == 0:
            shown += piece
            assert ended.text.startswith(shown)
    assert shown == ended.text


@pytest.mark.slow
def test_a_stop_string_ends_the_work_early():
    fast = writer(1)
    whole = fast.generate("Once upon a time", max_new_tokens=60, **SAMPLED)
    found = fast.generate("Once upon a time", max_new_tokens=60, stop=a_stop(whole.texts[0]), **SAMPLED)
    assert found.launches <= len(found.tokens[0]) + 3 + 2  # the string's own tokens, and what was launched ahead of the reading


def test_a_stop_string_that_never_comes_ends_by_length():
    fast = writer()
    found = fast.generate("Once", max_new_tokens=20, stop=["no such text"])
    assert found.sequences[0].finish == "length" and len(found.tokens[0]) == 20
    assert found.tokens == fast.generate("Once", max_new_tokens=20).tokens


@pytest.mark.slow
def test_a_stop_token_stays_among_the_tokens_and_out_of_the_text():
    fast = writer()
    whole = fast.generate("Once upon", max_new_tokens=40, **SAMPLED).tokens[0]
    place = next(i for i, token in enumerate(whole) if i > 8 and token not in whole[:i])
    found = fast.generate("Once upon", max_new_tokens=40, stop=whole[place], **SAMPLED).sequences[0]
    assert (found.tokens, found.finish) == (whole[: place + 1], "stop token")
    assert found.text == bytes(whole[:place]).decode(errors="replace")
    pieces = [piece for _, piece in fast.stream("Once upon", max_new_tokens=40, stop=whole[place], **SAMPLED)]
    assert "".join(pieces) == found.text


@pytest.mark.parametrize("leave", ["break", "close", "error"])
def test_a_stream_left_early_leaves_the_decoder_ready(leave):
    fast = gb.decoder(cases.build("Mistral"), 3, cases.ROOM, k=8, verify=False)
    want = fast.generate(cases.prompts(4), max_new_tokens=9).tokens
    stream = fast.stream(cases.prompts(30, 20, 10), max_new_tokens=60, temperature=1.0)
    next(stream)
    if leave == "close":
        stream.close()
    elif leave == "error":
        with pytest.raises(KeyError):
            stream.throw(KeyError("the caller's"))
    del stream
    gc.collect()
    assert fast.generate(cases.prompts(4), max_new_tokens=9).tokens == want
    assert fast.slots.ahead == 0


def test_gradients_are_on_between_two_tokens():
    """A generator that stops inside no_grad would leave its caller there."""
    fast = cases.shared("Mistral")
    states = [torch.is_grad_enabled() for _ in fast.stream([3, 4], max_new_tokens=20)]
    assert states and all(states) and torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.is_autocast_enabled("cpu") for _ in fast.stream([3, 4], max_new_tokens=20))


def test_the_first_token_comes_before_the_rest_is_computed():
    fast = cases.shared("Mistral", k=1)
    stream, steps = fast.stream([3, 4], max_new_tokens=60), []
    own = fast.graphs.launch
    try:
        fast.graphs.launch = lambda rows, k, way: (steps.append(k), own(rows, k, way))
        next(stream)
        assert len(steps) == 3  # as far as the host runs ahead of what it has read
    finally:
        fast.graphs.launch = own
        stream.close()


@pytest.mark.slow
def test_the_first_token_does_not_wait_for_a_graph_that_is_still_to_be_made(monkeypatch):
    monkeypatch.setattr(certificate, "ON_CPU", 12)
    fast = gb.decoder(cases.build("Mistral"), 1, cases.ROOM)
    stream, steps, own = fast.stream([3, 4], max_new_tokens=60), [], fast.graphs.launch
    fast.graphs.launch = lambda rows, k, way: (steps.append(k), own(rows, k, way))
    next(stream)
    assert steps == [1, 8]  # the certificate has made these; capturing 32 steps of a real model takes a second
    assert sum(len(new) for _, new in stream) == 59 and 32 in steps
    steps.clear()
    next(fast.stream([3, 4], max_new_tokens=60))
    assert steps == [1, 8, 32]


LEFT = """
import atexit, sys
import torch
import gpubound as gb
from gpubound.decode import certificate
from gpubound.models import Decoder, PRESETS

model = Decoder(PRESETS["tiny"]).to(sys.argv[1])
decoder = gb.decoder(model, 1, 64, verify=False)
atexit.register(lambda: print("busy at exit:", decoder.turn.taken))
stream = decoder.stream([[1, 2, 3]], max_new_tokens=40)
next(stream)
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_stream_left_open_is_closed_before_python_ends(device):
    """Left to the interpreter's end it aborts the process on a GPU (torch 2.11)."""
    done = subprocess.run(
        [forked.python(), "-c", LEFT, device], capture_output=True, text=True, timeout=120, env=plain_environment()
    )
    assert (done.returncode, done.stdout) == (0, "busy at exit: False\n"), done.stderr[-2000:]
