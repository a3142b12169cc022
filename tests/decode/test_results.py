"""What a generation holds: tokens, log-probabilities, why each sequence ended, what was read; and scores of given texts."""

import json

import pytest
import torch

import gpubound as gb
from gpubound.decode.runner import BatchState
from tests.messages import message, refusal

from . import cases

PROMPT = cases.prompts(6)[0]


def ended(found) -> list[tuple[int, str]]:
    return [(len(sequence.tokens), sequence.finish) for sequence in found.sequences]


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3", "own"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.4, "top_k": 20, "repetition_penalty": 1.3, "seed": 3}])
def test_logprobs_are_those_of_the_models_softmax(kind, settings):
    """Of the model's own logits, whatever settings chose the token."""
    fast = cases.shared(kind)
    found = fast.generate(cases.prompts(), max_new_tokens=16, logprobs=True, **settings)
    assert found.tokens == fast.generate(cases.prompts(), max_new_tokens=16, **settings).tokens
    for sequence in found.sequences:
        own = cases.logits(fast.model, sequence.prompt + sequence.tokens)[len(sequence.prompt) - 1 : -1].log_softmax(-1)
        want = own.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), want, rtol=0, atol=1e-4)


def test_no_logprobs_unless_asked_for():
    assert cases.shared().generate(PROMPT, max_new_tokens=4).sequences[0].logprobs == []


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3", "own"])
def test_score_is_the_log_probability_under_the_model(kind, monkeypatch):
    from gpubound.decode import transformer

    monkeypatch.setattr(transformer, "CHUNK", 32)
    monkeypatch.setattr(transformer, "SCORED", 12)
    fast = cases.shared(kind)
    texts = cases.prompts(90, 2, 1, 33)
    found = fast.score(texts)
    assert [len(row) for row in found] == [89, 1, 0, 32]
    for ids, scores in zip(texts, found):
        own = cases.logits(fast.model, ids)[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scores), own, rtol=0, atol=1e-4)


def test_score_agrees_with_logprobs_and_takes_a_full_text():
    fast = cases.shared("Qwen3")
    found = fast.generate(PROMPT, logprobs=True).sequences[0]
    assert len(PROMPT) + len(found.tokens) == cases.ROOM  # as far as max_length allows
    scores = fast.score(PROMPT + found.tokens)[0][len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(found.logprobs), rtol=0, atol=1e-4)


def test_score_of_too_long_a_text():
    assert refusal(ValueError, lambda: cases.shared().score([3] * 97)) == message("decode/results:score_of_too_long_a_text")


def test_more_tokens_than_there_is_room_for():
    fast = cases.shared()
    found = fast.generate(cases.prompts(1, 90, 95), max_new_tokens=1000)
    assert ended(found) == [(95, "length"), (6, "length"), (1, "length")]
    assert found.tokens[0] == cases.hugging_face(fast.model, cases.prompts(1, 90, 95)[0], 95)


def test_rows_that_end_at_different_times():
    """By a stop token each at its own place, one by length; the others go on as if alone."""
    fast = cases.shared("Mistral")
    given = cases.prompts(3, 9, 17, 5)
    whole = fast.generate(given, max_new_tokens=40).tokens
    stops = [whole[0][4], whole[1][20], whole[2][33]]
    want = [row[: min((row.index(stop) for stop in stops if stop in row), default=39) + 1] for row in whole]
    found = fast.generate(given, max_new_tokens=40, stop=stops)
    assert found.tokens == want and len({len(row) for row in want}) > 2
    finish = ["stop token" if row[-1] in stops else "length" for row in want]
    assert [sequence.finish for sequence in found.sequences] == finish


def test_a_stop_token_as_the_first_token():
    fast = cases.shared("Mistral")
    first = fast.generate(PROMPT, max_new_tokens=1).tokens[0]
    found = fast.generate(PROMPT, max_new_tokens=24, stop=first)
    assert found.tokens == [first] and ended(found) == [(1, "stop token")]
    assert found.launches <= 3


def test_a_stop_token_in_the_prompt_does_not_matter():
    fast = cases.shared("Mistral")
    whole = fast.generate(PROMPT, max_new_tokens=20).tokens[0]
    unseen = next(token for token in PROMPT if token not in whole)
    assert fast.generate(PROMPT, max_new_tokens=20, stop=unseen).tokens[0] == whole


def test_a_decoder_of_two_places():
    model = cases.shared().model
    fast = gb.decoder(model, 1, 2)
    assert fast.generate([5]).tokens[0] == cases.hugging_face(model, [5], 1)
    assert fast.score([5, 6])[0] == pytest.approx(cases.shared().score([5, 6])[0], abs=1e-5)


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}])
def test_a_choice_of_one_is_greedy(settings):
    fast = cases.shared("Mistral")
    want = fast.generate(cases.prompts(), max_new_tokens=16).tokens
    assert fast.generate(cases.prompts(), max_new_tokens=16, temperature=1.5, seed=9, **settings).tokens == want


def test_settings_of_sampling_do_not_touch_a_greedy_choice():
    fast = cases.shared("Mistral")
    want = fast.generate(PROMPT, max_new_tokens=20).tokens
    assert fast.generate(PROMPT, max_new_tokens=20, top_k=5, top_p=0.5, min_p=0.2, seed=8).tokens == want


@pytest.mark.parametrize("penalty", [0.8, 1.5])
def test_a_repetition_penalty_counts_the_prompts_tokens_as_hugging_face_does(penalty):
    fast = cases.shared("Mistral")
    given = cases.prompts(30, 4)
    want = [cases.hugging_face(fast.model, prompt, 24, repetition_penalty=penalty) for prompt in given]
    assert fast.generate(given, max_new_tokens=24, repetition_penalty=penalty).tokens == want
    assert want != fast.generate(given, max_new_tokens=24).tokens


def test_sequences_of_a_prompt_stand_together():
    fast = cases.shared("Mistral")
    one, two = cases.prompts(3, 5)
    found = fast.generate([one, two], n=2, max_new_tokens=12, temperature=1.5, seed=2)
    assert [sequence.prompt for sequence in found.sequences] == [one, one, two, two]
    assert fast.generate(two, n=2, max_new_tokens=12, temperature=1.5, seed=2).tokens == found.tokens[2:]


def test_the_roofline_counts_the_weights_once_and_the_live_cache():
    given = cases.prompts(10, 20)
    found = cases.shared("Llama").generate(given, max_new_tokens=8)
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 40 + 2 * 32
    weights = 4 * (2 * layer + 32 + 89 * 32)  # the head, which may be the embedding, too
    place = 4 * 2 * 2 * 2 * 8  # bytes of keys and values of 2 heads of 8 in 2 layers
    assert found.bytes_read == 8 * (weights + place * (14 + 24)) and found.steps == 8
    assert found.roofline(found.bytes_read / found.seconds) == pytest.approx(1.0)
    windowed = cases.shared("Mistral").generate(given, max_new_tokens=8)
    assert windowed.bytes_read == 8 * (weights + place * (9 + 9))  # its window's keys of each row


def test_the_result_as_json():
    found = cases.shared(tokenizer=cases.Bytes()).generate("ABC", max_new_tokens=5, logprobs=True)
    read = json.loads(json.dumps(found.as_dict()))
    assert read["sequences"][0] == {
        "prompt": [65, 66, 67],
        "tokens": found.tokens[0],
        "logprobs": found.sequences[0].logprobs,
        "finish": "length",
        "text": found.texts[0],
    }
    assert (read["tokens"], read["launches"], read["steps"]) == (5, 5, 5)
    assert 0 < found.first_token_s <= found.seconds and found.tokens_per_s == pytest.approx(5 / found.seconds)


def test_a_rows_state_begins_at_multiples_of_16_bytes():
    """Where it did not, Triton compiled attention for the graph and once more for the certificate."""
    rows = BatchState(1, 9, 2, torch.device("cpu")).rows
    assert [t.data_ptr() % 16 for t in (rows.token, rows.position, rows.limit)] == [0, 0, 0]
