"""Layers with a state: the tokens of the whole text, whatever rows held before, were refilled with, or were moved to."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import rollout, transformer
from gpubound.watch import no_stall, watch

from . import cases

KINDS = list(cases.RECURRENT)
DENSE = ["Lfm2", "Qwen3_5", "Bamba", "NemotronH", "Mamba2", "GraniteMoeHybrid dense"]
UNLIKE = ["Lfm2Moe", "Qwen3Next", "NemotronH", "Mamba2", "GraniteMoeHybrid", "FalconH1 normed"]  # in their parts
CAN_GO_BACK = ["Lfm2", "Lfm2Moe"]  # whose state is the inputs of convolutions alone


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Read prompts in several chunks, the last of them shorter than a convolution."""
    monkeypatch.setattr(transformer, "CHUNK", 9)


def decoder(kind: str, device, rows: int = 3, **options) -> gb.FastDecoder:
    fast = gb.decoder(cases.build(kind, device=device), rows, cases.ROOM, **{"verify": False} | options)
    assert fast.path == "" and fast.body.cache.states
    fast.body.poison()
    return fast


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_gives_the_models_tokens(kind, device):
    """Prompts of one token and of several chunks in one batch; the rows held other texts before."""
    fast = decoder(kind, device, verify=True)
    for given in (cases.prompts(20, 1, 6), cases.prompts(2, 28, 9, seed=2)):
        found = cases.assert_greedy(fast, given, 10)
        assert found[0] == fast.generate(given[0], max_new_tokens=10, stop=()).tokens[0]
    assert len({*found[0], *found[1], *found[2]}) > 8
    assert found[1][:6] == cases.hugging_face(fast.model, given[1], 6)


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_queue_of_prompts(kind, device):
    """Rows that are refilled while others go on, several samples of a prompt, a conversation, and rows that move."""
    fast, given = decoder(kind, device, 4), cases.prompts(20, 1, 6, 11)
    queue = fast.rollout(given, n=2, max_new_tokens=[2, 7, 5, 3], temperature=0.0)
    begins = {(number, sample): prompt for number, prompt in enumerate(given) for sample in range(2)}
    for one in queue:
        before = begins[one.prompt, one.sample]
        assert cases.likeliest(fast.model, before, one.tokens) == one.tokens
        begins[one.prompt, one.sample] = [*before, *one.tokens, 7, 8]
        if one.turn == 0 and one.prompt == 0:
            queue.extend(one, [7, 8], 4)
    assert len(queue.sequences) == 10


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_conversation_is_read_again_however_long_it_is(kind, device, monkeypatch):
    """A row's keys would serve its next turn, which begins before its last token; a state cannot go back."""
    monkeypatch.setattr(rollout, "KEPT", 1)
    fast, (prompt,) = decoder(kind, device), cases.prompts(20)
    queue = fast.rollout([prompt], max_new_tokens=4, temperature=0.0)
    first = next(queue)
    queue.extend(first, [7, 8])
    (second,) = queue
    assert cases.likeliest(fast.model, [*prompt, *first.tokens, 7, 8], second.tokens) == second.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [
    *((kind, {"pages": 5, "cache": "int8"}) for kind in UNLIKE), ("Lfm2", {"weights": "int8"}),
])  # fmt: skip
def test_formats_of_cache_and_weights(kind, options, device):
    """The certificate compares logits with fp32 at the rounded values."""
    fast = decoder(kind, device, verify=True, **options)
    given = cases.prompts(20, 1, 6)
    found = fast.generate(given, max_new_tokens=7).tokens
    assert found == [fast.generate(prompt, max_new_tokens=7).tokens[0] for prompt in given]
    queue = fast.rollout(given, max_new_tokens=7, temperature=0.0)
    assert [one.tokens for one in queue.sequences] == found


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAN_GO_BACK)
@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_that_are_taken_back(kind, rows, device):
    """Drafts looked up in a text that repeats itself, and those of a model, most of them wrong."""
    given = [[5, 6, 7] * 5, *cases.prompts(1, 8)][:rows]
    small = cases.build(kind, device=device, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    for speculate in (3, gb.Draft(small, 3)):
        cases.assert_greedy(decoder(kind, device, rows, speculate=speculate, verify=rows == 1), given, 12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CAN_GO_BACK])
def test_a_state_that_cannot_go_back_takes_no_drafts(kind):
    model = cases.build(kind)
    for large, speculate in ((model, 3), (cases.build("Llama"), gb.Draft(model, 2))):
        with pytest.raises(ValueError, match="speculate"):
            gb.decoder(large, 1, cases.ROOM, speculate=speculate)


@pytest.mark.parametrize("kind", DENSE)
def test_layers_on_two_devices(kind):
    """Two lanes of rows, whose states are parts of one tensor."""
    cases.assert_greedy(decoder(kind, "cpu", 4, devices=["cpu", "cpu"]), cases.prompts(20, 1, 6, 13), 10)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_model(kind, device):
    fast, (ids,) = decoder(kind, device), cases.prompts(25)
    want = cases.logits(fast.model, ids).log_softmax(-1)[:-1].gather(-1, torch.tensor(ids, device=device)[1:, None])[:, 0]
    assert fast.score(ids)[0] == pytest.approx(want.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", [*DENSE, *cases.BESIDE])
def test_on_a_cpus_own_path(kind, monkeypatch):
    monkeypatch.undo()
    fast = gb.decoder(cases.build(kind), 3, cases.ROOM, verify=False)
    assert fast.body.host is not None
    fast.body.poison()
    cases.assert_greedy(fast, cases.prompts(20, 1, 6), 5)
    for one in fast.rollout(cases.prompts(20, 1, 6, 9, 4), max_new_tokens=[2, 6, 4, 4, 4], temperature=0.0):
        assert cases.likeliest(fast.model, cases.prompts(20, 1, 6, 9, 4)[one.prompt], one.tokens) == one.tokens


@pytest.mark.parametrize("kind", DENSE)
def test_a_graph_holds_a_prompt(kind, device):
    """From the second of its size on: 24 layers of the delta rule are 3,000 launches."""
    fast = decoder(kind, device, 1)
    assert fast.body.captures_prefill
    for seed in range(3):
        cases.assert_greedy(fast, cases.prompts(20, seed=seed), 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNLIKE)
def test_kernels_in_the_interpreter(kind, interpret):
    report = cases.interpreted_report(interpret, cases.build(kind), cases.prompts(5, 1), 2)
    assert any(part == "3 x state" and what.startswith("triton: ") for part, what, _ in report), report


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNLIKE)
def test_a_step_waits_for_nothing(kind, sim):
    fast = gb.decoder(cases.build(kind, device=sim), 2, cases.ROOM, verify=False)
    cases.assert_never_waits(lambda rows, steps, variant: fast.stepper.run(rows, steps, variant), 2)
    ids, lengths = torch.zeros(2, 20, device=sim, dtype=torch.int64), torch.full((2,), 20, device=sim)
    with no_stall(), torch.no_grad(), watch() as ledger:
        fast.body.prefill(ids, lengths)
        fast.body.refill(ids, lengths, lengths[:, None] - 20)
        fast.body.move(lengths[:1] - 20, lengths[:1] - 19, 20)
    ledger.assert_within(syncs=0, h2d_bytes=0, d2h_bytes=0)


def test_convolutions_of_another_activation(device):
    """Those of the delta rule have the MLPs'. The error has the reasons of both paths."""
    model = cases.build("Qwen3_5", device=device, hidden_act="gelu")
    with pytest.raises(ValueError, match=r"a recurrent state .* since its convolutions have another activation than silu"):
        gb.decoder(model, 2, 32, verify=False)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3Next"])
def test_all_inputs_of_the_delta_rule_are_one_product(kind, device):
    fast = decoder(kind, device, 1)
    recurrent = [layer.attention for layer in fast.body.layers if layer.attention.weights.state() is not None]
    assert {len(part.products) for part in recurrent} == {2}  # with the output
    cases.assert_greedy(fast, cases.prompts(6), 5)
