"""Advantages, the rows that a step learns, and the order of prompts."""

import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpubound.rl.batches import RowShape, advantages, micro_batches
from gpubound.rl.rewards import AnswerGroup, PromptOrder, RLPrompt

CPU = torch.device("cpu")


def groups(count: int, samples: int, seq: int, seed: int = 0) -> list[AnswerGroup]:
    draw, made = random.Random(seed), []
    for _ in range(count):
        prompt = [draw.randrange(1, 50) for _ in range(draw.randint(1, seq // 2))]
        group = AnswerGroup(RLPrompt(None, prompt))
        for _ in range(samples):
            tokens = [draw.randrange(1, 50) for _ in range(draw.randint(1, seq - len(prompt)))]
            group.answers.append(
                SimpleNamespace(tokens=tokens, logprobs=[-draw.random() for _ in tokens], learnt=[True] * len(tokens))
            )
            group.rewards.append(draw.random())
        made.append(group)
    return made


def test_advantages_are_centred_within_a_group_and_scaled():
    (group,) = groups(1, 4, 8)
    rewards = np.array(group.rewards)
    assert advantages([group], scaled=False)[0] == pytest.approx(rewards - rewards.mean())
    wanted = (rewards - rewards.mean()) / (torch.tensor(group.rewards).double().std().item() + 1e-4)
    assert advantages([group], scaled=True)[0] == pytest.approx(wanted)
    group.rewards = [0.5] * 4
    assert advantages([group], scaled=True) == [[0] * 4]
    alone = groups(3, 1, 8)
    assert sum(value for (value,) in advantages(alone, scaled=False)) == pytest.approx(0)


def test_unpacked_rows_hold_one_answer():
    made = groups(3, 4, 16)
    shape = RowShape.of(12, 16, micro_batch=5, pack=False)
    assert shape == RowShape(5, 16, 3)
    batches = micro_batches(made, advantages(made, True), shape, CPU, pack=False)
    assert len(batches) == 3 and "segment_ids" not in batches[0]
    assert sum((batch["labels"] != -100).any(1).sum().item() for batch in batches) == 12


@pytest.mark.parametrize(("row_tokens", "micro_batch"), [(None, None), (40, 3), (16, 1), (4096, 2)])
def test_rows_hold_every_answer_once_after_its_prompt(row_tokens, micro_batch, device):
    seq, made = 16, groups(7, 5, 16)
    scores = advantages(made, scaled=True)
    shape = RowShape.of(7 * 5, seq, row_tokens, micro_batch)
    batches = micro_batches(made, scores, shape, device)
    assert len(batches) <= shape.most
    assert {(t.device.type, t.data_ptr() % 16) for batch in batches for t in batch.values()} == {(device.type, 0)}
    batches = [{name: values.cpu() for name, values in batch.items()} for batch in batches]
    found = []
    for batch in batches:
        assert batch["input_ids"].shape == (shape.rows, shape.tokens)
        bounds = batch["cu_seqlens"].tolist()
        most = max(int(ids.max()) + 1 for each in batches for ids in each["segment_ids"])
        room = next(size for size in (4, 16, 64) if size >= most)
        assert len(bounds) == shape.rows * (room + 1) + 1 and bounds == sorted(bounds)
        assert bounds[-1] == shape.rows * shape.tokens
        flat = {name: values.flatten() for name, values in batch.items()}
        for begin, end in pairwise(bounds):
            segments = flat["segment_ids"][begin:end]
            if begin == end or segments[0] < 0:
                assert (flat["labels"][begin:end] == -100).all()
                continue
            assert (segments == segments[0]).all() and flat["position_ids"][begin:end].tolist() == list(range(end - begin))
            labels = flat["labels"][begin:end]
            learnt = labels != -100
            ids = [*flat["input_ids"][begin:end].tolist(), labels[-1].item()]
            score = flat["advantages"][begin:end][learnt]
            assert (score == score[0]).all()
            sampled = flat["sampler_logprobs"][begin:end][learnt].tolist()
            found.append((ids, labels[learnt].tolist(), score[0].item(), sampled))
    wanted = [
        ([*group.prompt.ids, *answer.tokens], answer.tokens, pytest.approx(score), pytest.approx(answer.logprobs))
        for group, own in zip(made, scores)
        for answer, score in zip(group.answers, own)
    ]
    assert sorted(found, key=lambda one: one[:2]) == sorted(wanted, key=lambda one: one[:2])


def test_every_step_has_one_shape():
    shape = RowShape.of(answers=512, seq=700, row_tokens=2048, micro_batch=None)
    assert shape == RowShape(4, 2048, 64), "the worst case: two answers a row, each with all of its tokens"
    assert RowShape.of(answers=2, seq=10, row_tokens=None, micro_batch=None) == RowShape(1, 20, 1)


@pytest.mark.parametrize("seq", [600, 640, 1000, 1025, 2048, 5000])
def test_rows_of_the_longest_answers_are_full(seq):
    shape = RowShape.of(answers=512, seq=seq)
    places = shape.rows * shape.tokens * shape.most
    assert shape.tokens % seq == 0 and shape.rows * shape.tokens <= max(seq, 8192)
    assert places - 512 * seq < shape.rows * shape.tokens, "only the last micro-batch has room left"


def test_prompts_come_once_an_epoch_in_an_order_of_its_own():
    order = PromptOrder(5, seed=3)
    epochs = [order.take(5) for _ in range(3)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs) and epochs[0] != epochs[1]
    again = PromptOrder(5, seed=3, position=7)
    assert again.take(4) == [*epochs[1][2:], epochs[2][0]]
