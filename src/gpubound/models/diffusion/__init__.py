"""Diffusion models of masked tokens: training objective and sampler."""

from .masked import MaskedSampler as MaskedSampler
from .objective import MaskedDiffusion as MaskedDiffusion
