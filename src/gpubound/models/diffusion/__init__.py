"""Diffusion models of masked tokens and of noise: training objectives and samplers."""

from .masked import MaskedSampler as MaskedSampler
from .noise import NoisePrediction as NoisePrediction, NoiseSampler as NoiseSampler
from .objective import MaskedDiffusion as MaskedDiffusion
