"""Masked diffusion models: the training objective and the sampler."""

from .masked import MaskedSampler as MaskedSampler
from .objective import MaskedDiffusion as MaskedDiffusion
