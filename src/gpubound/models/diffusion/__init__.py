"""Samplers of diffusion models: of masked tokens, and of noise."""

from .denoise import NoiseSampler as NoiseSampler
from .masked import MaskedSampler as MaskedSampler
