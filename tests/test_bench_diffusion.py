"""`gpubound bench diffusion`: the peer writes the sampler's tokens, and a dry run measures both."""

import torch

from benchmarks import bench_diffusion
from benchmarks.plain_diffusion import PlainDecoder, generate
from benchmarks.shapes import SHAPES
from gpubound.cli import guarded
from gpubound.decode import MaskedSampler


def test_the_peer_is_the_same_algorithm():
    model = bench_diffusion.build(SHAPES["tiny"], torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    prompts = torch.randint(255, (2, 5), generator=torch.Generator().manual_seed(0))
    sampler, found = MaskedSampler(model, mask_token=255), []
    for cached in (False, True):
        want = sampler.generate(prompts, 8, steps=6, block=4, cache=cached).tokens
        found.append(generate(PlainDecoder(model, 13), prompts, 8, 4, 6, 255, cached))
        assert found[-1] == want
    assert found[0] != found[1]


def test_a_dry_run(capsys):
    assert guarded("bench", bench_diffusion.main, ["--dry"]) == 0
    said = capsys.readouterr().out
    assert "tiny batch 2, 4 steps for 8 tokens, cached" in said and "positions computed: 128, cached 80" in said
