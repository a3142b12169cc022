"""Quantised folders: the numbers that each format publishes, bit for bit, and the bytes that they take."""

import numpy as np
import pytest
import torch

from gpubound.layers.linear_product import format_of
from gpubound.layers.quantized_base import dequantised
from gpubound.models import Decoder
from gpubound.models.llama.checkpoint import load_hf
from gpubound.models.quantized import gguf
from gpubound.models.quantized.scheme import Coded
from gpubound.models.storing import numbers

from .cases import BLOCKS, FORMATS, gguf_tensor, write


def projections(model: Decoder) -> dict[str, torch.nn.Linear]:
    return {name: m for name, m in model.named_modules() if name.endswith("_proj")}  # type: ignore[misc]


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_is_read_into_the_numbers_that_it_publishes(tmp_path, name):
    wanted, kind = write(tmp_path, name), FORMATS[name][2]
    model = load_hf(tmp_path, dtype=torch.float32)
    for layer, module in projections(model).items():
        format = format_of(module.weight)
        assert (format.name if format.coded else "") == kind, layer
        values = dequantised([module.weight], torch.float32) if format.coded else module.weight
        # fp32's product of a code and its scale, except NF4's, whose absmax is rounded before
        assert torch.equal(values, wanted[f"{layer}.weight"].float()), layer
    for key in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(model.get_parameter(key), wanted[key])


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_a_gguf_file_are_read_into_the_numbers_that_it_publishes(name):
    (kind, shape, raw), wanted = gguf_tensor(name, np.random.default_rng(0), 6, 512)
    blocks = gguf.TYPES[kind]
    assert blocks.name == name
    data = torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(6, -1, blocks.nbytes)
    weight = blocks.read(data, 512)
    assert isinstance(weight, Coded) and weight.kind.name == BLOCKS[name][3]
    assert torch.equal(numbers(weight, shape, torch.float32), wanted.float())
