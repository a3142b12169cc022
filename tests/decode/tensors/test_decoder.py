"""A model whose layers are sliced over devices, beside the model itself and a decoder on one. The CPU stands for each."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

import gpubound as gb
from gpubound.decode.placement import tensor_parallel, tensor_parallel as sliced_runner
from gpubound.decode.runner import SamplingVariant
from gpubound.kernels import peer_exchange
from gpubound.kernels.peer_exchange import Mail
from tests.messages import message, refusal

from .. import cases

KINDS = {"Llama": 2, "Qwen3": 2, "Gemma2": 2, "Phi3": 2, "own": 2, "Llama of four": 4}


def sliced(kind: str = "Llama", devices: int = 2, **options) -> gb.FastDecoder:
    return gb.decoder(model(kind), 4, cases.ROOM, devices=["cpu"] * devices, split="tensors", **options)


def model(kind: str) -> torch.nn.Module:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4} if kind.endswith("four") else {}
    return cases.build(kind.partition(" of")[0], **heads)


@pytest.mark.parametrize("kind, devices", KINDS.items())
def test_tokens_and_logits_are_those_of_the_model(kind, devices):
    """Rows of different lengths; the certificate has compared logits with fp32."""
    fast = sliced(kind, devices)
    assert fast.path == "" and fast.certificate.logits_error < 1e-5
    cases.assert_greedy(fast, cases.prompts(), 9)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_step_gives_the_logits_of_one_device(rows):
    """To 1e-5, and the stream is the same on both devices, to the bit."""
    whole = cases.build("Llama")
    fast = gb.decoder(whole, rows, cases.ROOM, devices=["cpu", "cpu"], split="tensors", verify=False).body
    one = gb.decoder(whole, rows, cases.ROOM, verify=False).body
    token, position = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    for _ in range(3):
        for body in (fast, one):
            body.begin(token)
        torch.testing.assert_close(fast.step(token, position), one.step(token, position), rtol=0, atol=1e-5)
        assert torch.equal(*(part.x for part in fast.slices)) and fast.x.abs().sum() > 0
        assert torch.equal(fast.arg.gather(1, fast.best.argmax(1, keepdim=True))[:, 0], fast.logits.argmax(1).int())
        token, position = fast.logits.argmax(1).int(), position + 1


@pytest.mark.slow
def test_settings_stops_and_figures():
    """Drawn tokens, penalties and log-probabilities are those of a decoder on one device; the cache's forms too."""
    kept = {"cache": "int8", "pages": 12, "verify": False}
    fast = sliced(**kept)
    cases.assert_alike(fast, gb.decoder(model("Llama"), 4, cases.ROOM, **kept))
    assert fast.accuracy(cases.prompts(8)[0]).kind == "int8 cache"


def compute_at_once(fast: gb.FastDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs record, a thread for each device in place of a GPU: each runs ahead until it needs what another sends."""
    come, devices = Mail.words, range(len(fast.body.peers))

    def waited(mail: Mail, rows: int) -> torch.Tensor:
        until = time.monotonic() + 60
        while ((mail.box[:, :rows] >> 32).int() != mail.stamp()).any():
            assert time.monotonic() < until, "nobody sends what this device waits for"
            time.sleep(1e-5)
        return come(mail, rows)

    def at_once(call: Callable[[int], None]) -> None:
        failed: list[BaseException] = []

        def run(number: int) -> None:
            try:
                with torch.no_grad():
                    call(number)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed

    graphs = fast.graphs
    monkeypatch.setattr(Mail, "words", waited)
    monkeypatch.setattr(graphs, "launch", lambda *how: at_once(lambda number: graphs._run_on(number, *how)))
    if fast.body.captures_prefill:
        monkeypatch.setattr(graphs, "prefill", lambda ids, _: at_once(lambda number: fast.body.prompt_on(number, ids)))


WAYS = pytest.mark.parametrize(
    "way", [SamplingVariant(), SamplingVariant(greedy=False, logprobs=True)], ids=["greedy", "sampled"]
)


@WAYS
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_devices_at_once_wait_for_each_other(devices, way, monkeypatch):
    fast = sliced("Llama of four", devices, verify=False)
    want = fast.generate(cases.prompts(4, 2), max_new_tokens=9, temperature=float(not way.greedy), seed=1).tokens
    compute_at_once(fast, monkeypatch)
    fast.body.poison()
    found = fast.generate(cases.prompts(4, 2), max_new_tokens=9, temperature=float(not way.greedy), seed=1)
    assert found.tokens == want


def test_what_compiles_beforehand_is_what_is_called(monkeypatch):
    """In the same forms: another would be compiled and tested in vain, and this one at the first request."""
    named, called, own = [], set(), peer_exchange.implementation
    monkeypatch.setattr(sliced_runner, "start_self_tests", lambda calls, *where: named.extend(calls))

    def asked(op, like, unable=None, shape=()):
        called.add((op, shape))
        return own(op, like, unable, shape)

    monkeypatch.setattr(peer_exchange, "implementation", asked)
    sliced(verify=False).generate(cases.PROMPT, max_new_tokens=2)
    assert called == {("send_words", (0,)), ("take_words", (False,)), ("take_words", (True,))} and called <= {*named}


@pytest.mark.slow
def test_weights_that_change_and_weights_that_move(said):
    """The slices are copies: they are taken again, into the same memory."""
    fast = sliced(verify="quick")
    kept = [t.data_ptr() for one in fast.body.models for t in one._copies]
    cases.assert_follows(fast)
    assert message("decode/tensors/decoder:weights_that_change_and").within(said())
    assert [t.data_ptr() for one in fast.body.models for t in one._copies] == kept


@pytest.mark.slow
def test_a_layer_of_another_width_since():
    """It is sliced anew; or refused, each time, where it does not divide."""
    fast = sliced(verify=False)
    before, (_, own) = cases.of_decoder(fast, 8), fast.model.model.layers
    for width, bias in ((96, True), (24, False)):
        other = cases.build("Llama", intermediate_size=width, attention_bias=bias).model.layers[1]
        fast.model.model.layers[1] = other
        found = cases.of_decoder(fast, 8)
        assert found == cases.likeliest(fast.model, cases.PROMPT, found)
    fast.model.model.layers[1] = cases.build("Llama", intermediate_size=45).model.layers[1]
    for _ in range(2):
        assert refusal(gb.GenerateError, lambda: cases.of_decoder(fast, 8)) == message(
            "decode/tensors/decoder:a_layer_of_another_width"
        )
    fast.model.model.layers[1] = own
    assert cases.of_decoder(fast, 8) == before


def test_a_weight_that_is_no_number_is_named():
    fast = sliced(verify=False)
    with torch.no_grad():
        fast.model.model.layers[1].mlp.up_proj.weight[-1, 3] = float("nan")
    with pytest.raises(gb.GenerateError, match=r"first seen in model\.layers\.1\.mlp"):
        fast.generate(cases.PROMPT, max_new_tokens=3)


def test_a_device_that_waited_in_vain_is_named():
    """Not the weights: a sum without another's words is NaN, whatever they are. The next request waits again."""
    fast = sliced(verify=False)
    want, send = fast.generate(cases.PROMPT, max_new_tokens=6).tokens, fast.body._finish

    def late(parts, rows):
        send(parts, rows)
        fast.body.slices[0].x.fill_(float("nan"))
        fast.body.peers[1].wait(0)

    fast.body._finish = late
    assert refusal(gb.GenerateError, lambda: fast.generate(cases.PROMPT, max_new_tokens=6)).startswith(
        "sequence 0: cpu timed out waiting for another GPU, so the logits at position "
    )
    del fast.body._finish
    assert fast.generate(cases.PROMPT, max_new_tokens=6).tokens == want


def test_words_that_do_not_come_fail_the_certificate(monkeypatch):
    """A sum without the other device's part is NaN, and no token comes of it."""
    monkeypatch.setattr(tensor_parallel, "send_words", lambda y, mail, column=0: None)
    with pytest.raises(gb.GenerateError, check=message("decode/tensors/decoder:words_that_do_not_come_f")):
        sliced(verify="quick")


def test_the_plan_is_printed_and_stands_in_the_table(said):
    fast = sliced(verify=False)
    lines = [line for line in said().splitlines() if "slice" in line]
    assert [line.partition(" on ")[0] for line in lines] == [f"gpubound: decoder: slice {number}" for number in range(2)]
    assert message("decode/tensors/decoder:the_plan_is_printed_and").within(lines[1])
    assert ("slice 1", "cpu", lines[1].partition("): ")[2].partition(";")[0]) in fast.body.report()
