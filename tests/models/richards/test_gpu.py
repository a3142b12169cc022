"""On a GPU: a step of each part is captured and is the eager one, and decoding gives the tokens of the text read anew."""

import pytest
import torch

import gpubound as gb
from gpubound.models.richards import RichardsConfig, RichardsDecoder
from gpubound.models.richards.model import TABLES

from .test_decoding import greedy

pytestmark = pytest.mark.gpu
PARTS = [{field: name} for field, table in TABLES.items() for name in table]


def model_of(parts, dtype=None):
    torch.manual_seed(0)
    return RichardsDecoder(RichardsConfig(128, 256, 2, 2, 1, 512, **parts), device="cuda", dtype=dtype)


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_a_captured_step_is_the_eager_one(parts):
    ids = torch.randint(512, (4, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = {}
    for graph in ("require", "off"):
        model = model_of(parts).train()
        step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-3), clip=1.0, graph=graph)
        # the same batch each time: a loss on new random tokens need not fall
        losses[graph] = [step({"input_ids": ids, "labels": ids}).read().loss for _ in range(6)]
        step.close()
    assert losses["require"] == pytest.approx(losses["off"], rel=1e-3) and losses["off"][-1] < losses["off"][0]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_tokens_are_those_of_the_text_read_anew(parts):
    model = model_of(parts, torch.float32).eval()
    texts = [torch.randint(512, (n,), device="cuda") for n in (17, 5, 1)]
    fast = gb.decoder(model, 4, 64)
    got = fast.generate([t.tolist() for t in texts], max_new_tokens=12, stop=()).tokens
    assert got == [greedy(model, t, 12) for t in texts]
