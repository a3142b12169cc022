"""A tiny model, and examples for it."""

import pytest
import torch

from gpubound.models import Decoder, DecoderConfig
from gpubound.serve import Policies

WORDS, LENGTH = 64, 32
FIRST = [{"prompt": [1, 2, 3], "answer": [4, 5, 6]}, {"prompt": [1, 9], "answer": [7, 7, 7, 8], "advantage": -0.5}]
SECOND = [{"prompt": [1, 2, 3], "answer": [9, 10]}]


def base() -> torch.nn.Module:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, vocabulary=WORDS))


def policies(*names: str, model: torch.nn.Module | None = None, **options) -> Policies:
    found = Policies(
        base() if model is None else model, **{"max_length": LENGTH, "max_batch": 4, "rows": 2, "ends": ()} | options
    )
    for name in names:
        found.create(name, rank=4 if name == "first" else 2, lr=1e-2, seed=len(name))
    return found


@pytest.fixture
def pair():
    return policies("first", "second")
