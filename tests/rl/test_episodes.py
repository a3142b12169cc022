"""Answers of several turns: what an environment may return, what is learnt of it, and its faults."""

import json
import threading
import time

import numpy as np
import pytest
import torch

import gpubound as gb
from gpubound.data.tokenizer import Tokenizer, train_tokenizer
from gpubound.errors import RewardError
from gpubound.rl import Episode, PythonTool, RetryTests
from gpubound.rl.batches import RowShape, micro_batches
from gpubound.rl.episodes import Episodes, read_environment
from gpubound.rl.rewards import AnswerGroup, RLPrompt

from .policies import NEW, WORDS, policy, train, wide_policy

pytestmark = pytest.mark.usefixtures("one_thread")
TALK = {"turns": 3, "seq": 40, "max_new_tokens": 4}


def goes_on(episode):
    """Say 11 as often as the turn has sevens, and once more; end a conversation of which the last turn begins with a 3."""
    episode.state["replies"] = episode.state.get("replies", 0) + 1
    return None if episode.ids[0] == 3 else [11] * (1 + episode.ids.count(7))


def test_a_conversation_is_what_was_said_in_it(tmp_path):
    seen = []

    def noting(completion_ids, turns, states, finish):
        seen.extend(zip(completion_ids, turns, states))
        return [float(len(each)) for each in turns]

    run = train(tmp_path, noting, environment=goes_on, steps=1, **TALK)
    record = run.tape.steps()[0]
    assert len(seen) == 32 and record["turns"] > 1.5
    for ids, turns, state in seen:
        spoken, said = turns[::2], turns[1::2]
        assert [turn["role"] for turn in turns] == (["assistant", "environment"] * 3)[: len(turns)]
        assert spoken[-1]["content"] == ids and len(said) == len(spoken) - 1
        assert all(reply["content"] == [11] * (1 + turn["content"].count(7)) for turn, reply in zip(spoken, said))
        assert len(spoken) == 3 or ids[0] == 3
        assert state == {"replies": len(said) + (ids[0] == 3 and len(spoken) < 3)}
    assert record["tokens"] == sum(len(turn["content"]) for _, turns, _ in seen for turn in turns[::2])
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert all(row["answer"] in [turns if len(turns) > 1 else turns[0]["content"] for _, turns, _ in seen] for row in rows)


def test_what_the_environment_says_is_read_and_not_learnt():
    model = policy().eval()
    decoder = gb.decoder(model, max_batch=4, max_length=32)
    asked = [RLPrompt(None, [1, 2, 3]), RLPrompt(None, [5])]
    played = Episodes(None, lambda episode: [9, 9], turns=3, new=4, seq=32)
    rollout = decoder.rollout([p.ids for p in asked], n=3, max_new_tokens=4, logprobs=True, seed=1, stop=())
    with played:
        episodes = list(played.play(rollout, asked, lambda: None))
    groups = [AnswerGroup(prompt, [episode for episode in episodes if episode.prompt is prompt]) for prompt in asked]
    assert [len(group.answers) for group in groups] == [3, 3]
    for episode in episodes:
        assert episode.learnt == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 2 + [True] * 4
        logits = model(torch.tensor([[*episode.prompt.ids, *episode.tokens]]))[0, len(episode.prompt.ids) - 1 : -1]
        logprobs = logits.float().log_softmax(-1)[torch.arange(16), episode.tokens]
        learnt = np.array(episode.learnt)
        assert np.array(episode.logprobs)[learnt] == pytest.approx(logprobs.detach().numpy()[learnt], abs=1e-5)
    (batch,) = micro_batches(groups, [[1.0] * 3] * 2, RowShape(1, 128, 1), torch.device("cpu"))
    labels = batch["labels"][batch["labels"] != -100]
    assert len(labels) == 6 * 12 and sorted(labels.tolist()) == sorted(
        token for episode in episodes for token, counts in zip(episode.tokens, episode.learnt) if counts
    )


def test_an_environment_that_writes_into_the_tokens_it_gets_changes_no_conversation(device):
    def played(environment):
        decoder, asked = gb.decoder(policy().to(device).eval(), max_batch=2, max_length=24), [RLPrompt(None, [1, 2, 3])]
        rollout = decoder.rollout([[1, 2, 3]], n=2, max_new_tokens=4, seed=1, stop=())
        with (episodes := Episodes(None, environment, turns=2, new=4, seq=24)):
            return {one.sample: one.tokens for one in episodes.play(rollout, asked, lambda: None)}

    def writing(episode):
        episode.ids.append(3)
        return [9]

    assert played(writing) == played(lambda episode: [9])


def test_answers_that_end_together_are_decoded_together(monkeypatch):
    tokenizer, decoded = train_tokenizer(["one two three"], 280), []
    decode = Tokenizer.decode_batch
    monkeypatch.setattr(
        Tokenizer, "decode_batch", lambda self, many, **how: (decoded.append(len(many)), decode(self, many, **how))[1]
    )
    decoder = gb.decoder(policy().eval(), max_batch=4, max_length=32)
    rollout = decoder.rollout([[1, 2, 3], [5]], n=3, max_new_tokens=4, stop=())
    with Episodes(tokenizer, new=4, seq=32) as played:
        episodes = list(played.play(rollout, [RLPrompt("a", [1, 2, 3]), RLPrompt("b", [5])], lambda: None))
    assert decoded == [4, 2] and all(one.text == tokenizer.decode(one.tokens, skip_special=True) for one in episodes)


@pytest.mark.slow
def test_a_policy_learns_to_say_in_a_turn_what_it_must_not_say_in_another(tmp_path):
    def late(turns):
        first, last = ([each[n]["content"].count(7) / 4 for each in turns] for n in (0, -1))
        return [after - before for before, after in zip(first, last)]

    run = train(tmp_path, late, environment=lambda episode: [11, 11], steps=24, lr=3e-2, **TALK | {"turns": 2})
    records = run.tape.steps()
    assert records[0]["reward"] < 0.1, "and 0 on average for a policy that does not look at the turn"
    assert max(record["reward"] for record in records) > 0.2
    # Weights that are an update old are 0.4 to 6 apart. By the batch that a turn falls into, which time decides, fp32's
    # rounding made 1e-5, and once 1.3e-4.
    assert max(record["largest_gap"] for record in records) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_a_run_of_conversations_resumes_with_the_same_answers(exact, tmp_path):
    """Replies come at other times, so other rows share a batch: log-probabilities have other bits, but not with exact."""
    keys = TALK | {"environment": goes_on, "exact": exact, "prompts_per_step": 2, "samples": 4}
    whole = train(tmp_path / "whole", steps=3, model=wide_policy(), **keys)
    train(tmp_path / "parts", steps=2, model=wide_policy(), **keys)
    parts = train(tmp_path / "parts", steps=3, model=wide_policy(), resume=True, **keys)
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("whole", "parts")]
    assert whole.done == 3 and samples[0] == samples[1]
    if exact:
        assert all(torch.equal(one, other) for one, other in zip(whole.model.parameters(), parts.model.parameters()))
        assert all(record["largest_gap"] == 0 for record in parts.tape.steps())


def test_replies_are_computed_while_other_rows_go_on(tmp_path):
    """Each reply waits until two are asked for: one after the other would never end."""
    meeting = threading.Barrier(2, timeout=10)

    def meets(episode):
        meeting.wait()
        return None if episode.policy_turns == 2 else [11]

    train(tmp_path, environment=meets, steps=1, **TALK)


def test_conversations_end_where_there_is_no_room(tmp_path, capsys):
    reply = torch.tensor([11] * 5, device="cpu")
    run = train(tmp_path, environment=lambda episode: reply, steps=1, turns=9, seq=20, max_new_tokens=4)
    assert 1 < run.tape.steps()[0]["turns"] < 3
    assert capsys.readouterr().err.count("5 tokens leaves no room in seq, 20") == 1


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (lambda episode: 1 / 0, "ZeroDivisionError"),
        (lambda episode: exit(3), "SystemExit"),
        (lambda episode: "a text", "tokenizer"),
        (lambda episode: [WORDS], str(WORDS)),
        (lambda episode: 7, "wanted a text"),
        (lambda episode: [{"content": "a text"}], "wanted a text"),
        (lambda episode: episode.tokens.clear() or [1], "state"),
        (lambda episode: time.sleep(3), "0.2 seconds"),
    ],
    ids=["raises", "exits", "text", "token", "number", "role", "clears", "hangs"],
)
def test_an_environment_that_fails_is_named_and_nothing_is_lost(environment, words, tmp_path):
    with pytest.raises(RewardError, match=words) as error:
        train(tmp_path, environment=environment, steps=2, timeout=0.2 if "0.2" in words else 60.0, **TALK)
    assert "--resume" in str(error.value) and "\n" not in str(error.value)
    assert train(tmp_path, environment=goes_on, steps=1, resume=True, **TALK).done == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"environment": goes_on, "turns": 3}, "seq"),
        ({"environment": goes_on, "seq": 40}, "turns"),
        ({"turns": 3}, "environment"),
        ({"environment": "python_tol", "turns": 2, "seq": 40}, "python_tool"),
        ({"environment": "nowhere.py:reply", "turns": 2, "seq": 40}, "environment: nowhere.py"),
        ({"environment": 7, "turns": 2, "seq": 40}, "function"),
    ],
)
def test_what_is_no_environment_is_refused(keys, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(tmp_path, steps=1, **keys)


def test_environments_are_functions_classes_or_names(tmp_path):
    file = tmp_path / "replies.py"
    file.write_text(
        "class Echo:\n    def __call__(self, episode):\n        return episode.ids\n\ndef ends(episode):\n    return None\n"
    )
    assert read_environment(None) is None and read_environment("python_tool") == PythonTool()
    assert read_environment(f"{file}:ends")(None) is None
    assert read_environment(f"{file}:Echo")(said("", ids=[4])) == [4]


def said(text, ids=(), **columns):
    return Episode(RLPrompt("", [], columns), 0, 0, text=text, ids=list(ids))


def test_python_tool_replies_with_what_the_code_prints():
    tool = PythonTool()
    assert tool(said("So:\n```python\nprint(6 * 7)\n```\n")) == [{"role": "user", "content": "42"}]
    assert "ZeroDivisionError" in tool(said("```\n1 / 0\n```"))[0]["content"]
    assert tool(said("```\nx = 1\n```"))[0]["content"] == "(no output)"
    assert tool(said("The answer is 42.")) is None


def test_retry_tests_replies_until_they_pass():
    episode = said("```python\ndef f(): return 1\n```", tests="assert f() == 2")
    assert "AssertionError" in RetryTests()(episode) and episode.state["passed"] is False
    episode.text = "```python\ndef f(): return 2\n```"
    assert RetryTests()(episode) is None and episode.state["passed"] is True
    with pytest.raises(RewardError, match="retry_tests needs 'tests'"):
        RetryTests()(said(""))


def test_a_reply_to_a_chat_is_written_by_its_template():
    tokenizer = train_tokenizer(["two and two are four", "sure it is"], 280)
    prompt = [{"role": "user", "content": "two and two"}]
    ids = tokenizer.inner.encode(tokenizer.render(prompt, prompt=True), add_special_tokens=False).ids
    reply = [{"role": "user", "content": "sure"}]
    whole = [*prompt, {"role": "assistant", "content": "four"}, *reply]
    wanted = tokenizer.inner.encode(tokenizer.render(whole, prompt=True), add_special_tokens=False).ids
    end = tokenizer.inner.token_to_id("<|end|>")
    for tokens, finish in (([*tokenizer.encode("four"), end], "stop"), (tokenizer.encode("four"), "length")):
        episode = Episode(RLPrompt(prompt, ids), 0, 0, finish=finish, tokens=tokens)
        for given in ("sure", reply, reply[0]):
            messages, after = Episodes(tokenizer)._written(episode, given)
            assert messages == reply and [*ids, *tokens, *after] == wanted


def test_the_length_of_a_turn_is_bounded_by_each_limit(tmp_path):
    lengths = []

    def noting(turns):
        lengths.extend(len(turn["content"]) for each in turns for turn in each[::2])
        return [0.0] * len(turns)

    train(
        tmp_path,
        noting,
        environment=lambda episode: [11],
        steps=1,
        prompts=[[1] * 4],
        turns=3,
        seq=4 + NEW + 4,
        max_new_tokens=NEW,
    )
    assert set(lengths) == {NEW, 3}
