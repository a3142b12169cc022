"""DeepSeek-V4 over several devices, its layers sliced or in stages: every kind of layer, in numbers and in tokens."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch

import gpubound as gb
from benchmarks.deepseek_models import build_model
from tests.decode.tensors.test_decoder import WAYS, compute_at_once
from tests.messages import message

from . import cases


def sliced(model=None, devices: int = 2, **options) -> gb.FastDecoder:
    return gb.decoder(model or cases.build(), 4, cases.ROOM, devices=["cpu"] * devices, split="tensors", **options)


def likeliest(model, prompt: list[int], row: list[int]) -> list[int]:
    logits = cases.own_logits(model, torch.tensor([*prompt, *row[:-1]]))
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_tokens_are_those_of_the_model(devices):
    """Rows before and behind the window's end, one of them longer than what an index chooses from. Text is scored as well."""
    model = cases.build(o_groups=4)
    fast = sliced(model, devices, verify=devices == 2)
    given = [cases.text(length, seed=length).tolist() for length in (3, 30, 11, 1)]
    found = fast.generate(given, max_new_tokens=9).tokens
    assert found == [likeliest(model, prompt, row) for prompt, row in zip(given, found)]
    whole = gb.decoder(model, 4, cases.ROOM, verify=False)
    assert fast.score(given[1])[0] == pytest.approx(whole.score(given[1])[0], abs=1e-4)
    assert fast.body.bytes_a_step([30]) > whole.body.bytes_a_step([30])  # what all heads read is read by each


def test_the_plan_is_printed_and_stands_in_the_table(said):
    """As much as is then there: each tensor is counted, also while it is only planned."""
    fast = sliced(verify=False)
    lines = [line.partition("): ")[2] for line in said().splitlines() if "slice" in line and ": part" in line]
    assert lines[1].startswith("part 2 of 2 of each layer, words 48 to 88: ") and lines[1].endswith(" of state")
    assert [(f"slice {number}", "cpu", line) for number, line in enumerate(lines)] == fast.body.shares()


def test_the_stream_is_the_same_on_all_devices():
    fast = sliced(verify=False).body
    fast.begin(None)
    token, position = torch.tensor([5, 9], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with torch.no_grad():
        going = [fast._begun(number, token, position) for number in range(2)]
        for part in range(len(going[0].names)):
            for act in ("give", "spread"):
                for one in going:
                    getattr(one, act)(part)
            assert torch.equal(*(one.streams.x for one in going)) and going[0].streams.x.std() > 0


@pytest.mark.slow
def test_codes_are_sliced_as_they_are():
    """fp4 experts and fp8 layers, whose numbers the model's own forward writes out."""
    model = build_model(torch.device("cpu"), dry=True, codes=True)
    fast = gb.decoder(model, 1, 64, devices=["cpu", "cpu"], split="tensors", verify=False)
    whole = gb.decoder(model, 1, 64, verify=False)
    prompt = torch.randint(89, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    assert fast.generate(prompt, max_new_tokens=9).tokens == whole.generate(prompt, max_new_tokens=9).tokens
    halves = [span.layers[0].mixture.weights for span in fast.body.spans]
    one = whole.body.layers[0].mixture.weights
    assert torch.equal(torch.cat([half.down.words for half in halves], 1), one.down.words)
    assert torch.equal(
        torch.cat([half.shared_down.weight.codes.float() for half in halves], 1), one.shared_down.weight.codes.float()
    )
    assert halves[0].down.columns * 2 == one.down.columns


@pytest.mark.slow
@WAYS
def test_devices_at_once_wait_for_each_other(way, monkeypatch):
    fast = sliced(verify=False)
    given, how = [cases.text(5).tolist(), cases.text(14).tolist()], {"temperature": float(not way.greedy), "seed": 1}
    want = fast.generate(given, max_new_tokens=5, **how).tokens
    compute_at_once(fast, monkeypatch)
    fast.body.poison()
    assert fast.generate(given, max_new_tokens=5, **how).tokens == want


@pytest.mark.slow
def test_a_trial_launch_leaves_the_request_as_it_was(monkeypatch):
    """It comes behind the request's prompt, and its devices wait for nobody: the second finds no token and no position."""
    fast, prompt = sliced(verify=False), cases.text(9).tolist()
    want = fast.generate(prompt, max_new_tokens=6).tokens
    graphs = fast.graphs

    def made(rows, steps, way):
        saved = graphs.state(rows)
        for number in (1, 0):
            graphs._run_on(number, rows, 1, way)
        assert fast.body.spans[1].layers[0].attention.window.data.isnan().any()
        for tensor, before in saved:
            tensor.copy_(before)
        return partial(graphs.run, rows, steps, way)

    monkeypatch.setattr(graphs, "_make", made)
    graphs.clear()
    assert fast.generate(prompt, max_new_tokens=6).tokens == want


def test_a_token_that_does_not_come_is_no_token(monkeypatch):
    """Its streams are NaN, so no device goes on with another token."""
    fast = sliced(verify=False).body
    fast.begin(None)
    fast.peers[0].send = lambda *told: None
    x = fast._begun(1, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)).streams.x
    assert x.isnan().all()


@pytest.mark.slow
def test_weights_that_change_and_weights_that_move(said):
    model = cases.build()
    fast, prompt = sliced(model, verify=False), cases.text(9).tolist()
    before = fast.generate(prompt, max_new_tokens=9).tokens[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter) + 0.5)
    changed = fast.generate(prompt, max_new_tokens=9).tokens[0]
    assert changed == likeliest(model, prompt, changed) and changed != before
    assert message("decode/tensors/compressed:weights_that_change_and").within(said())
    model.load_state_dict({name: t.clone() for name, t in cases.build().state_dict().items()}, assign=True)
    assert fast.generate(prompt, max_new_tokens=9).tokens[0] == before


@pytest.mark.slow
def test_a_copy_that_broke_off_is_made_by_the_next_request(monkeypatch):
    """As where another has the memory for a while."""
    model = cases.build()
    fast, prompt = sliced(model, verify=False), cases.text(9).tolist()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    with monkeypatch.context() as short:
        short.setattr("gpubound.models.deepseek_v4.decode.sliced.slice_of", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            fast.generate(prompt, max_new_tokens=4)
    found = fast.generate(prompt, max_new_tokens=4).tokens[0]
    assert found == likeliest(model, prompt, found)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"devices": ["cpu", "cpu"]}, {"devices": ["cpu", "cpu"], "split": "tensors"}], ids=str)
def test_graphs_are_made_anew_behind_a_call_of_rebind(how, monkeypatch):
    """What they have read is freed. A write through `.data` is no change that a decoder sees by itself."""
    model, prompt, cleared = cases.build(), cases.text(9).tolist(), []
    fast = gb.decoder(model, 1, cases.ROOM, k=1, verify=False, **how)
    clear = fast.graphs.clear
    monkeypatch.setattr(fast.graphs, "clear", lambda: cleared.append(1) or clear())
    fast.generate(prompt, max_new_tokens=4)
    model.lm_head.weight.data.copy_(model.lm_head.weight.flip(0))
    fast.body.rebind()
    for _ in range(2):
        found = fast.generate(prompt, max_new_tokens=4).tokens[0]
    assert found == likeliest(model, prompt, found) and len(cleared) == 1


NOT_SLICED = {
    "groups": ({}, 4, "layer 0 has 2 groups of heads, which do not divide by 4"),
    "experts": ({"o_groups": 4, "moe_intermediate_size": 18}, 4, "layer 0 has experts of 18 columns, which do not divide by 4"),
    "words": ({"o_groups": 8, "num_attention_heads": 8}, 8, "its 89 words are fewer than 16 a device"),
}


@pytest.mark.parametrize("options, count, why", NOT_SLICED.values(), ids=NOT_SLICED)
def test_models_that_do_not_divide(options, count, why):
    with pytest.raises(ValueError) as error:
        sliced(cases.build(**options), count)
    assert str(error.value) == message("decode/tensors/compressed:models_that_do_not_divid", count, why)


@pytest.mark.slow
def test_layers_that_no_longer_divide():
    """Columns beyond the last whole share would be nobody's."""
    model, other = cases.build(), cases.build(moe_intermediate_size=17)
    with pytest.raises(ValueError, check=message("decode/tensors/compressed:layers_that_no_longer_di")):
        sliced(other)
    fast, prompt = sliced(model, verify=False), cases.text(9).tolist()
    before, own = fast.generate(prompt, max_new_tokens=4).tokens, model.model.layers[1].mlp
    model.model.layers[1].mlp = other.model.layers[1].mlp
    for part, what in (("experts", "experts"), ("shared_experts", "a shared expert")):
        for _ in range(2):
            with pytest.raises(gb.GenerateError) as error:
                fast.generate(prompt, max_new_tokens=4)
            assert str(error.value) == message("decode/tensors/compressed:layers_that_no_longer_di.2", what)
        setattr(model.model.layers[1].mlp, part, getattr(own, part))
    model.model.layers[1].mlp = own
    assert fast.generate(prompt, max_new_tokens=4).tokens == before


@pytest.mark.parametrize(
    "options, why",
    [
        ({"hidden_size": 64}, "its streams are 64 wide, and what devices tell each other has room for 32"),
        ({"partial_rotary_factor": 0.5}, "its heads turn 8 of their numbers, which were 4"),
    ],
)
def test_a_model_of_other_sizes_since(options, why):
    model, other = cases.build(), cases.build(**options)
    fast = sliced(model, verify=False)
    model.model, model.lm_head = other.model, other.lm_head
    for _ in range(2):
        with pytest.raises(gb.GenerateError) as error:
            fast.generate([3], max_new_tokens=2)
        assert str(error.value) == message("decode/tensors/compressed:a_model_of_other_sizes_s", why)


def test_codes_that_do_not_divide():
    model = build_model(torch.device("cpu"), dry=True, codes=True)
    model.config.o_groups = 4
    for block in model.model.layers:
        block.self_attn.o_a_proj.n_groups = 4
    with pytest.raises(ValueError, check=message("decode/tensors/compressed:codes_that_do_not_divide")):
        sliced(model, 4)


def test_a_slice_that_does_not_fit(monkeypatch):
    monkeypatch.setattr("gpubound.models.deepseek_v4.decode.sliced.free_bytes", lambda devices: [2**40, 1000])
    with pytest.raises(ValueError, check=message("decode/tensors/compressed:a_slice_that_does_not_fi")):
        sliced()


@pytest.mark.slow
def test_tokens_in_stages():
    """Rows that stand before and behind the window's end, in lanes; one of them longer than what an index chooses from."""
    fast = gb.decoder(cases.build(), 4, cases.ROOM, devices=["cpu"] * 3)
    assert [len(span.layers) for span in fast.body.spans] == [1, 1, 1]
    given = [cases.text(length, seed=length).tolist() for length in (3, 30, 11, 1)]
    found = fast.generate(given, max_new_tokens=9).tokens
    for prompt, row in zip(given, found):
        logits = cases.own_logits(fast.model, torch.tensor([*prompt, *row[:-1]]))
        assert row == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_its_cache_has_one_form():
    with pytest.raises(ValueError) as error:
        gb.decoder(cases.model_of(), 1, 64, cache="int8", devices=["cpu", "cpu"])
    assert str(error.value) == message("decode/stages/compressed:its_cache_has_one_form")
