"""transformers' DeepSeek-V4 modules, tiny and with random weights: what the definitions of its ops are compared with."""

import pytest
import torch

from tests.kernels.cases import draw


def theirs():
    return pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")


def config(**sizes):
    """Epsilons that are large enough to show wherever one is missing."""
    found = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    plain = {"hidden_size": 24, "head_dim": 16, "partial_rotary_factor": 0.5, "rms_norm_eps": 0.1, "hc_eps": 0.01}
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}
    return found.DeepseekV4Config(**plain | {"compress_rates": rates, "hc_sinkhorn_iters": 5, "num_hidden_layers": 2} | sizes)


def filled(module: torch.nn.Module) -> torch.nn.Module:
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(draw(torch.device("cpu"), torch.float32, *parameter.shape, seed=i) * 0.5)
    return module


def angles(rotary: torch.nn.Module, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (count, pairs) of the positions of compressing layers."""
    cos, sin = rotary(torch.zeros(1), torch.arange(count)[None], layer_type="compress")
    return cos[0].contiguous(), sin[0].contiguous()
