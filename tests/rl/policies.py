"""What the tests of reinforcement learning share: a tiny random policy, and a task that it learns in some steps."""

import torch

import gpubound as gb
from gpubound import Decoder, DecoderConfig

WORDS, WANTED, NEW = 20, 7, 6
PROMPTS = [[1, 2, 3], [4, 5], [3, 3, 3, 3], [9]]
KEYS = {"prompts_per_step": 4, "samples": 8, "max_new_tokens": NEW, "lr": 2e-2, "device": "cpu"}


def policy(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(hidden=16, intermediate=32, layers=1, heads=2, kv_heads=1, vocabulary=WORDS))


def wide_policy() -> Decoder:
    """A policy whose widths are multiples of 64: exact=True has equal bits on every CPU then."""
    torch.manual_seed(0)
    return Decoder(DecoderConfig(hidden=64, intermediate=128, layers=1, heads=1, kv_heads=1, vocabulary=64))


def sevens(completion_ids, **_):
    return [sum(token == WANTED for token in ids) / NEW for ids in completion_ids]


def train(out, rewards=sevens, prompts=PROMPTS, model=None, **keys):
    return gb.rl.train(policy() if model is None else model, prompts, rewards, **KEYS | {"out": str(out)} | keys)
