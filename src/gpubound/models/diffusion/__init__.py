"""Diffusion models of masked tokens and of noise: training objectives and samplers."""

from .masked import MaskedSampler as MaskedSampler
from .objective import MaskedDiffusion as MaskedDiffusion, NoisePrediction as NoisePrediction, NoiseSampler as NoiseSampler
